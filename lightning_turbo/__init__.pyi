# Made by scripts/overview.py.

from lightning_turbo import amp as amp
from lightning_turbo._lightning import bind_lightning as bind_lightning
from lightning_turbo.amp.grad_scaler import ApexGradScaler as ApexGradScaler
from lightning_turbo.callbacks.augment import AugmentBatches as AugmentBatches
from lightning_turbo.callbacks.drop_bias import DropBiasBeforeNorm as DropBiasBeforeNorm
from lightning_turbo.callbacks.effective_batch_size import EffectiveBatchSize as EffectiveBatchSize
from lightning_turbo.callbacks.exact_accumulation import ExactAccumulation as ExactAccumulation
from lightning_turbo.callbacks.exact_resume import ExactResume as ExactResume
from lightning_turbo.callbacks.fused_optimizers import FusedOptimizers as FusedOptimizers
from lightning_turbo.callbacks.grad_to_none import GradToNone as GradToNone
from lightning_turbo.callbacks.lr_range import lr_range as lr_range
from lightning_turbo.callbacks.memory_format import MemoryFormat as MemoryFormat
from lightning_turbo.callbacks.preemption import Preemption as Preemption
from lightning_turbo.callbacks.prefetch import Prefetch as Prefetch
from lightning_turbo.data import augment as augment
from lightning_turbo.data.dali.loader import DALILoader as DALILoader
from lightning_turbo.data.loading.device import DevicePrefetcher as DevicePrefetcher
from lightning_turbo.data.loading.loader import PrefetchLoader as PrefetchLoader
from lightning_turbo.data.loading.loader import seed_samples as seed_samples
from lightning_turbo.data.loading.tune_workers import tune_workers as tune_workers
from lightning_turbo.data.normalize import Normalize as Normalize
from lightning_turbo.data.orders.length_batch_sampler import LengthBatchSampler as LengthBatchSampler
from lightning_turbo.data.orders.seeded_sampler import SeededSampler as SeededSampler
from lightning_turbo.data.orders.weighted_sampler import WeightedSampler as WeightedSampler
from lightning_turbo.data.packed.packed_dataset import PackedDataset as PackedDataset
from lightning_turbo.data.packed.patches import PatchDataset as PatchDataset
from lightning_turbo.datamodules.dali import DALIDataModule as DALIDataModule
from lightning_turbo.datamodules.prefetch import PrefetchDataModule as PrefetchDataModule
from lightning_turbo.doctor.callback import Doctor as Doctor
from lightning_turbo.nn.bias import drop_bias_before_norm as drop_bias_before_norm
from lightning_turbo.optim.cyclic import cyclic_lr as cyclic_lr
from lightning_turbo.optim.layerwise import lamb as lamb
from lightning_turbo.optim.layerwise import lars as lars
from lightning_turbo.optim.param_groups import merge_param_groups as merge_param_groups
from lightning_turbo.plugins.apex_amp import ApexAMP as ApexAMP
from lightning_turbo.plugins.checkpoint_io import AtomicCheckpointIO as AtomicCheckpointIO
from lightning_turbo.plugins.real_apex import RealApexAMP as RealApexAMP
from lightning_turbo.strategies.turbo import TurboStrategy as TurboStrategy
from lightning_turbo.strategies.turbo_ddp import TurboDDPStrategy as TurboDDPStrategy

__version__: str
PUBLIC: dict[str, dict[str, str]]

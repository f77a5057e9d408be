from corpus_base import Base


class Model(Base):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)  # <- finding: gradients-kept

// Happens-before with a vector clock for each stream (Lamport, 1978; Mattern, 1989). Raises an error if a stream uses
// memory that another stream still uses, which sometimes gives wrong results on a real device.
#include "streams.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <vector>

#include "device.h"

namespace pretended {

namespace {

struct Copy {
  int64_t stream, number;
  at::Tensor to, from;
};

std::recursive_mutex lock;
using Locked = std::lock_guard<std::recursive_mutex>;
std::map<int64_t, Clock> clocks;  // completed work when a stream begins its next operation
Clock host;                       // work that is known to be complete
std::vector<Copy> under_way;
std::map<int64_t, std::vector<Clock>> free_again;  // by stream: uses of memory that its next operation may reuse
thread_local int64_t current_stream = 0;

void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, number] : other) clock[stream] = std::max(clock[stream], number);
}

bool over(Clock& clock, int64_t stream, int64_t number) { return clock[stream] >= number; }

}  // namespace

int64_t on_stream(int64_t id) {
  int64_t before = current_stream;
  if (id >= 0) current_stream = id;
  return before;
}

void used(const at::Tensor& tensor, bool written, const char* by) {
  if (!tensor.defined() || !tensor.is_cuda() || !tensor.has_storage()) return;
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  if (block == nullptr) return;
  Locked guard(lock);
  const int64_t stream = current_stream;
  Clock& clock = clocks[stream];
  join(clock, host);
  for (const auto& uses : std::exchange(free_again[stream], {}))
    for (const auto& [other, number] : uses)
      TORCH_CHECK(over(clock, other, number), by, " on stream ", stream, " may take memory that was given back while ",
                  "stream ", other, " still uses it; there was no record_stream");
  auto check = [&](int64_t other, int64_t number, const char* what) {
    TORCH_CHECK(over(clock, other, number), by, " on stream ", stream, written ? " writes" : " reads",
                " memory that stream ", other, " still ", what, "; nothing makes it wait");
  };
  check(block->written.first, block->written.second, "writes");
  if (written)
    for (const auto& [other, number] : block->read) check(other, number, "reads");
  const int64_t number = ++clock[stream];
  if (written) {
    block->written = {stream, number};
    block->read.clear();
  } else {
    block->read[stream] = number;
  }
}

void keep(const c10::DataPtr& memory, int64_t stream) {
  Locked guard(lock);
  if (auto* block = static_cast<Block*>(memory.get_context())) block->kept.insert(stream);
}

void given_back(const Block& block) {
  Locked guard(lock);
  auto uses = block.read;
  uses[block.written.first] = std::max(uses[block.written.first], block.written.second);
  uses.erase(block.home);
  for (int64_t stream : block.kept) uses.erase(stream);
  if (!uses.empty()) free_again[block.home].push_back(std::move(uses));
}

Clock* record(int64_t stream) {
  Locked guard(lock);
  join(clocks[stream], host);
  return new Clock(clocks[stream]);
}

void wait(int64_t stream, const Clock& event) {
  Locked guard(lock);
  join(clocks[stream], event);
}

void host_waits(const Clock& event) {
  Locked guard(lock);
  join(host, event);
  std::vector<Copy> rest;
  for (auto& copy : under_way) {
    if (over(host, copy.stream, copy.number)) {
      copy.to.copy_(copy.from);
    } else {
      rest.push_back(copy);
    }
  }
  under_way = std::move(rest);
}

void host_waits_for(int64_t stream) {
  Locked guard(lock);
  host_waits(clocks[stream]);
}

void host_waits_for_all() {
  Locked guard(lock);
  for (const auto& [stream, clock] : std::map<int64_t, Clock>(clocks)) host_waits(clock);
}

void arrives_later(const at::Tensor& to, const at::Tensor& from) {
  Locked guard(lock);
  auto alias = to.detach();
  alias.fill_(77);  // makes reads before synchronization visible
  under_way.push_back({current_stream, ++clocks[current_stream][current_stream], alias, from.clone()});
}

}  // namespace pretended

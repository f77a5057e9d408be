// Which work of each stream is complete, derived from the order of the calls and not from their duration.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <set>

namespace pretended {

using Clock = std::map<int64_t, int64_t>;  // for each stream, the number of its completed operations

struct Block {  // a block of device memory
  void* data;
  int64_t size, home;            // in bytes; the stream that it was allocated on
  std::pair<int64_t, int64_t> written{0, 0};  // the stream and the number of the operation
  Clock read{};
  std::set<int64_t> kept{};  // streams of record_stream
};

int64_t on_stream(int64_t id = -1);  // sets the thread's current stream and returns the previous one
void used(const at::Tensor& tensor, bool written, const char* by);  // an operation on the current stream
void keep(const c10::DataPtr& memory, int64_t stream);              // record_stream
void given_back(const Block& block);

Clock* record(int64_t stream);                     // an event
void wait(int64_t stream, const Clock& event);     // a stream for an event
void host_waits(const Clock& event);               // the host for an event,
void host_waits_for(int64_t stream);               // for a stream,
void host_waits_for_all();                         // and for the device

/// Completes a copy to pinned memory only after the host has synchronized with it.
void arrives_later(const at::Tensor& to, const at::Tensor& from);

}  // namespace pretended

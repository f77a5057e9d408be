// Which work of which stream is over when: found out from the order of the calls, whatever the time they take.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <set>

namespace pretended {

using Clock = std::map<int64_t, int64_t>;  // of each stream, how much of its work is over

struct Block {  // of a device's memory
  void* data;
  int64_t size, home;            // in bytes; the stream that it was allocated on
  std::pair<int64_t, int64_t> written{0, 0};  // the stream, and the number of its work
  Clock read{};
  std::set<int64_t> kept{};  // streams of record_stream
};

int64_t on_stream(int64_t id = -1);  // makes another stream the thread's current one, and returns the one before
void used(const at::Tensor& tensor, bool written, const char* by);  // work on the current stream
void keep(const c10::DataPtr& memory, int64_t stream);              // record_stream
void given_back(const Block& block);

Clock* record(int64_t stream);                     // an event
void wait(int64_t stream, const Clock& event);     // a stream for an event
void host_waits(const Clock& event);               // the host for an event,
void host_waits_for(int64_t stream);               // for a stream,
void host_waits_for_all();                         // and for the device

/// Let a copy to pinned memory arrive when the host has waited for it, and not before.
void arrives_later(const at::Tensor& to, const at::Tensor& from);

}  // namespace pretended

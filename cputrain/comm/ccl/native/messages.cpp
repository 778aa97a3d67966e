#include "messages.hpp"

#include <algorithm>
#include <cstring>

#include <ATen/Functions.h>

namespace cputrain {

Inbox::Inbox(ccl::communicator& comm, int size) : comm_(comm), rank_(comm.rank()), channels_(size) {}

bool Inbox::awaits() const {
  return std::ranges::any_of(channels_, [](const auto& channel) { return channel.event.has_value(); });
}

void Inbox::expect(const std::shared_ptr<Receive>& receive) {
  for (int source = 0; source < static_cast<int>(channels_.size()) && !receive->ended; source++) {
    if ((receive->source == source || receive->source == kAnySource) && take_kept(channels_[source], *receive)) {
      receive->source = source;
    }
  }
  if (!receive->ended) {
    waiting_.push_back(receive);
    progress();
  }
}

void Inbox::progress() {
  for (int source = 0; source < static_cast<int>(channels_.size()); source++) {
    progress(source);
  }
}

void Inbox::progress(int source) {
  auto& channel = channels_[source];
  while (true) {
    if (channel.event) {
      if (!channel.event->test()) {
        return;
      }
      channel.event.reset();
    }
    switch (channel.state) {
      case State::idle:
        if (!is_expected(source)) {
          return;
        }
        channel.header = std::make_unique<Header>();
        open(channel, channel.header.get(), sizeof(Header), source);
        channel.state = State::header;
        break;
      case State::header:
        channel.state = State::known;
        break;
      case State::known:
        channel.receive = match(source, channel.header->tag);
        if (!channel.receive && !is_expected(source)) {
          return;
        }
        ask_for_data(source);
        channel.state = State::data;
        break;
      case State::data:
        if (!channel.receive) {
          channel.receive = match(source, channel.header->tag);
        }
        if (channel.receive) {
          deliver(*channel.receive, channel.data);
        } else {
          channel.kept.push_back({channel.header->tag, channel.data});
        }
        channel.receive.reset();
        channel.data = Tensor();
        channel.state = State::idle;
        break;
    }
  }
}

// Removes and returns the first waiting receive that matches a message, nullptr if none.
std::shared_ptr<Receive> Inbox::match(int source, int64_t tag) {
  const auto found = std::ranges::find_if(waiting_, [&](const auto& receive) {
    return receive->tag == tag && (receive->source == source || receive->source == kAnySource);
  });
  if (found == waiting_.end()) {
    return nullptr;
  }
  auto receive = *found;
  waiting_.erase(found);
  receive->source = source;
  return receive;
}

bool Inbox::is_expected(int source) const {
  return source != rank_ && std::ranges::any_of(waiting_, [&](const auto& receive) {
    return receive->source == source || receive->source == kAnySource;
  });
}

void Inbox::ask_for_data(int source) {
  auto& channel = channels_[source];
  const auto bytes = channel.header->bytes;
  const bool fits = channel.receive && static_cast<int64_t>(channel.receive->buffer.nbytes()) == bytes;
  channel.data = fits ? channel.receive->buffer : at::empty({bytes}, at::kByte);
  if (bytes > 0) {
    open(channel, channel.data.data_ptr(), bytes, source);
  }
}

void Inbox::open(Channel& channel, void* at, int64_t bytes, int source) {
  channel.event = ccl::recv(at, bytes, ccl::datatype::uint8, source, comm_);
}

void Inbox::deliver(Receive& receive, const Tensor& data) {
  receive.found_bytes = static_cast<int64_t>(data.nbytes());
  if (data.nbytes() == receive.buffer.nbytes() && data.nbytes() > 0 && data.data_ptr() != receive.buffer.data_ptr()) {
    std::memcpy(receive.buffer.data_ptr(), data.data_ptr(), data.nbytes());
  }
  receive.ended = true;
}

bool Inbox::take_kept(Channel& channel, Receive& receive) {
  const auto found =
      std::ranges::find_if(channel.kept, [&](const auto& message) { return message.tag == receive.tag; });
  if (found == channel.kept.end()) {
    return false;
  }
  deliver(receive, found->data);
  channel.kept.erase(found);
  return true;
}

void Outbox::post(const std::shared_ptr<Send>& message, int destination) {
  channels_[destination].queue.push_back(message);
  progress(destination);
}

void Outbox::progress(int destination) {
  auto& channel = channels_[destination];
  const auto send = [&](const void* from, size_t bytes) {
    channel.event = ccl::send(const_cast<void*>(from), bytes, ccl::datatype::uint8, destination, comm_);
  };
  while (!channel.queue.empty()) {
    if (channel.event && !channel.event->test()) {
      return;
    }
    channel.event.reset();
    auto& message = *channel.queue.front();
    switch (message.state) {
      case Send::State::queued:
        message.state = Send::State::header;
        send(&message.header, sizeof(Header));
        break;
      case Send::State::header:
        message.state = Send::State::data;
        if (message.data.nbytes() > 0) {
          send(message.data.const_data_ptr(), message.data.nbytes());
        }
        break;
      default:
        message.state = Send::State::ended;
        channel.queue.pop_front();
    }
  }
}

}  // namespace cputrain

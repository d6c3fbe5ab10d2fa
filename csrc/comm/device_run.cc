// Operations of a DeviceGroup: on the devices where the ranks reach one another there, else through
// memory of the host and the group's way for that.
#include <algorithm>
#include <bit>
#include <cstring>

#include "comm/communicator.h"
#include "comm/device.h"

namespace ringcomm {
namespace {

// all_reduce by the two-shot kernel up to here: above, a ring has less traffic at each rank's door.
constexpr uint64_t kTwoShotBytes = 8 << 20;

uint64_t total(const std::vector<Span>& spans) {
  uint64_t bytes = 0;
  for (const Span& span : spans) bytes += span.bytes;
  return bytes;
}

// What goes through memory of the host is timed there, from when the stream has come to it: whether
// that ever does is looked at later.
constexpr auto kOwnStream = std::chrono::seconds(1);

// Half of what boards and slots hold: so far behind may a peer be.
constexpr uint32_t kMostUnderWay = cuda::kOperations / 2;

// At the head of a buffer for memory of the host: two words, of the stream's and of the host's.
constexpr uint64_t kHead = 128;
std::atomic<uint32_t>& word(std::byte* buffer, int index) {
  return reinterpret_cast<std::atomic<uint32_t>*>(buffer)[index * 16];
}
enum { kArrived, kOver };
std::byte* address(std::byte* buffer, int index) {  // the same for the device
  return reinterpret_cast<std::byte*>(&word(buffer, index));
}

int track_of(const MessageKind& message) {
  return 1 + 2 * message.peer + (message.sending ? 1 : 0);
}

}  // namespace

// Any error but a refusal fails the group: of what was asked for, a part may have been enqueued.
template <typename Enqueue>
DeviceGroup::EndPtr DeviceGroup::guarded(const std::string& asked, Enqueue&& enqueue) {
  const std::lock_guard lock(enqueue_mutex_);
  try {
    const cuda::OnDevice here(api_, device_);
    return enqueue();
  } catch (const UsageError&) {
    throw;
  } catch (const cuda::DeviceError& error) {
    const std::string text = str(asked, ": ", error.what());
    std::rethrow_exception(group_.fail(std::make_exception_ptr(PeerError(group_.rank(), text))));
  } catch (const std::exception&) {
    std::rethrow_exception(group_.fail(std::current_exception()));
  }
}

void DeviceGroup::connect() {
  guarded("connect", [&]() -> EndPtr {
    meet({circle_of(-1)}, "the group's first meeting");
    return nullptr;
  });
}

DeviceGroup::EndPtr DeviceGroup::enqueue(const Operation& operation, cuda::Stream caller,
                                         bool aside, const Finish& finish) {
  validate(operation, group_.size(), group_.rank());
  const std::string asked = to_text(make_descriptor(operation, 0));
  return guarded(asked, [&] {
    refuse_capture(caller);
    meet({circle_of(-1)}, asked);
    const cuda::Stream stream = begin({0}, caller, aside);
    const auto limit = operation.timeout.count() > 0 ? operation.timeout : group_.timeout();
    Pending pending{{}, 0, 0, -1, limit, Deadline(limit), {}};
    make_room();
    if (reach(-1)) {
      const Shape shape = make_shape(operation, team_->geometry());
      const auto algorithm = choose(shape);
      pending.operation = make_descriptor(operation, ++sequence_);
      set_plan(pending.operation, algorithm, hash_of_terms(shape.geometry, shape.costs, 1));
      announce(operation, pending.operation);
      pending.ticket = recorder_.begin(pending.operation);
      run(operation, shape, algorithm, stream);
    } else {
      pending.result = run_on_host(operation, stream);
      pending.operation = make_descriptor(operation, group_.sequence());
      pending.deadline = Deadline(limit + kOwnStream);
    }
    if (finish) finish(stream);
    return end({0}, stream, {pending});
  });
}

void DeviceGroup::scale(DType dtype, double factor, Span dst, const std::byte* src,
                        cuda::Stream caller) {
  guarded("scale", [&]() -> EndPtr {
    refuse_capture(caller);
    team_->scale(caller, dtype, factor, dst, src);
    return nullptr;
  });
}

// Boards and slots hold the last so many operations: more are never under way.
void DeviceGroup::make_room() {
  const auto behind = [&] { return reached(0, tracks_[0].issued + 1 - kMostUnderWay); };
  Waiter waiter([&](Clock::time_point) {
    group_.watch();
    group_.check_waiting("the operations before it");
  });
  while (!behind()) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    waiter.look_when_due();
  }
}

void DeviceGroup::announce(const Operation& operation, const Descriptor& descriptor) {
  Transport& transport = group_.transport();
  Stamps stamps;
  make_stamps(operation, descriptor, stamps);
  // Of what the lower rank of a pair sends to the higher one, and gets from it.
  const auto stamp = [&](Rank peer) {
    const uint64_t sent = stamps.outgoing(peer, kData), received = stamps.incoming(peer, kData);
    return group_.rank() < peer ? sent * 31 + received : received * 31 + sent;
  };
  for (Rank peer = 0; peer < group_.size(); ++peer) {
    own().stamp(descriptor.sequence, peer).store(stamp(peer), std::memory_order_relaxed);
  }
  transport.announce(Board::kDevice, descriptor);
  try {
    inquiry_.check_peers(descriptor);
  } catch (const PeerError&) {
    await_owed(numbered(descriptor));
    throw;
  }
  for (Rank peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank() || !transport.descriptor(peer, Board::kDevice, descriptor.sequence)) {
      continue;
    }
    const cuda::Area theirs = area_of(peer);
    const auto& said = theirs.stamp(descriptor.sequence, group_.rank());
    if (said.load(std::memory_order_relaxed) != stamp(peer)) {
      inquiry_.throw_mismatch(descriptor, peer);
    }
  }
}

// By which algorithm; nullopt: by the kernels of all_reduce.
std::optional<Algorithm> DeviceGroup::choose(const Shape& shape) const {
  const bool sums = shape.collective == Collective::kAllReduce;
  if (const auto wished = group_.wished(shape.collective)) return wished;
  const bool short_enough = found_.own_devices && shape.bytes <= kTwoShotBytes;
  if (sums && (found_.one_device || short_enough)) return std::nullopt;
  // Between devices of their own, traffic from neighbour to neighbour suits any wiring.
  return sums ? Algorithm::kRing : select(shape, {.mapped = true});
}

void DeviceGroup::run(const Operation& operation, const Shape& shape,
                      std::optional<Algorithm> algorithm, cuda::Stream stream) {
  const Spans input(operation.input), output(operation.output);
  const Reduction reduction = make_reduction(operation, group_.size());
  if (!algorithm) return team_->all_reduce(stream, sequence_, reduction, input, output);
  team_->run(stream, *plans_.get(shape, *algorithm), sequence_, reduction, input, output);
}

// ---- messages

DeviceGroup::EndPtr DeviceGroup::enqueue(const std::vector<Posted>& messages, cuda::Stream caller,
                                         const Finish& finish) {
  const std::string asked = to_text(make_descriptor(messages[0].kind));
  return guarded(asked, [&] {
    refuse_capture(caller);
    std::vector<int> tracks;
    std::vector<Pending> pending;
    std::vector<cuda::Transfer> transfers;
    for (const Posted& message : messages) {
      const Descriptor descriptor = make_descriptor(message.kind);
      const int track = track_of(message.kind);
      if (std::find(tracks.begin(), tracks.end(), track) == tracks.end()) tracks.push_back(track);
      const auto limit = message.timeout.count() > 0 ? message.timeout : group_.timeout();
      pending.push_back({descriptor, track, 0, message.kind.peer, limit, {}, {}});
    }
    std::vector<cuda::Circle> circles;
    for (const Posted& message : messages) circles.push_back(circle_of(message.kind.peer));
    meet(circles, asked);
    const cuda::Stream stream = begin(tracks, caller, true);
    std::vector<Posted> through_host;
    for (size_t i = 0; i < messages.size(); ++i) {
      const Posted& message = messages[i];
      if (reach(message.kind.peer)) {
        pending[i].number = compare(message);
        pending[i].ticket = recorder_.begin(pending[i].operation);
        transfers.push_back({message.kind.sending, message.kind.peer, message.data});
      } else {
        through_host.push_back(message);
      }
    }
    if (!transfers.empty()) team_->transfer(stream, transfers);
    const auto results = post_on_host(through_host, stream);
    for (size_t i = 0, next = 0; i < pending.size() && !results.empty(); ++i) {
      if (!pending[i].ticket) pending[i].result = results[next++];
    }
    if (finish) finish(stream);
    return end(tracks, stream, std::move(pending));
  });
}

// The k-th message to a peer and its k-th from here are one: they must have one size, and one tag.
// As with boards, of the two sides at least one sees what the other has written.
uint64_t DeviceGroup::compare(const Posted& message) {
  const auto [sending, dtype, count, peer, tag] = message.kind;
  uint64_t& before = (sending ? sent_ : received_)[static_cast<size_t>(peer)];
  const uint64_t number = ++before;
  const uint64_t said =
      number << 48 | (static_cast<uint64_t>(tag) & 0xff) << 40 | message.data.bytes;
  own().message(peer, sending, number).store(said, std::memory_order_seq_cst);
  const uint64_t other = area_of(peer).message(group_.rank(), !sending, number).load();
  if (other >> 48 != (number & 0xffff) || other == said) return number;
  const uint64_t bytes = other & ((uint64_t{1} << 40) - 1);
  const std::string what = bytes == message.data.bytes ? "another tag" : str(bytes, " bytes");
  throw MismatchError(str(to_text(make_descriptor(message.kind)), ": it has ", message.data.bytes,
                          " bytes, and rank ", peer, sending ? " receives " : " sends ", what,
                          ": between devices messages are matched in the order of the calls"));
}

// ---- through memory of the host

std::byte* DeviceGroup::buffer(uint64_t bytes, int track) {
  const uint32_t value = tracks_[static_cast<size_t>(track)].issued + 1;
  note_progress();  // before a result is overwritten
  for (Buffer& buffer : buffers_) {
    if (buffer.bytes < bytes || buffer.bytes > 4 * bytes + 4096) continue;
    if (!reached(buffer.track, buffer.value)) continue;
    buffer.track = track;
    buffer.value = value;
    word(buffer.memory, kArrived).store(0);
    word(buffer.memory, kOver).store(0);
    return buffer.memory;
  }
  // Of few sizes, so that there are few: none is freed while streams run, that would wait for them.
  const uint64_t size = std::bit_ceil(kHead + bytes);
  std::byte* const memory = api_.allocate_pinned(size);
  std::memset(memory, 0, kHead);
  buffers_.push_back({memory, size - kHead, track, value});
  return memory;
}

// Returns where it will stand how it ended; null: it has ended, and well.
const std::atomic<uint32_t>* DeviceGroup::run_on_host(const Operation& operation,
                                                      cuda::Stream stream) {
  const uint64_t in = total(operation.input), out = total(operation.output);
  std::byte* const memory = buffer(in + out, 0);
  std::byte* at = memory + kHead;
  for (const Span& span : operation.input) {
    api_.copy(stream, at, span.data, span.bytes);
    at += span.bytes;
  }
  Operation there = operation;
  there.input = {{memory + kHead, in}};
  there.output = {{at, out}};
  if (streams_meet_) {
    const auto over = [memory](const std::exception_ptr& error) {
      word(memory, kOver).store(error ? kBad : kGood);
    };
    api_.write(stream, address(memory, kArrived), 1);
    group_.submit(std::move(there), over, {}, &word(memory, kArrived));
    api_.wait_until(stream, address(memory, kOver), kGood);
  } else {
    api_.synchronize(stream);
    group_.run(there);
  }
  for (const Span& span : operation.output) {
    api_.copy(stream, span.data, at, span.bytes);
    at += span.bytes;
  }
  if (streams_meet_) return &word(memory, kOver);
  api_.synchronize(stream);
  return nullptr;
}

std::shared_ptr<Message> DeviceGroup::message_for(const Posted& posted, std::byte* buffer) const {
  const bool limited = posted.timeout.count() > 0;
  auto message = std::make_shared<Message>(limited ? posted.timeout : group_.timeout());
  message->sending = posted.kind.sending;
  message->peer = posted.kind.peer;
  message->tag = posted.kind.tag;
  message->dtype = posted.kind.dtype;
  message->data = {buffer + kHead, posted.data.bytes};
  message->on_done = [buffer](const std::exception_ptr& error) {
    word(buffer, kOver).store(error ? kBad : kGood);
  };
  return message;
}

// All are on their way before the stream waits for one: the peers may do the same.
std::vector<const std::atomic<uint32_t>*> DeviceGroup::post_on_host(
    const std::vector<Posted>& messages, cuda::Stream stream) {
  std::vector<const std::atomic<uint32_t>*> results;
  std::vector<std::shared_ptr<Message>> posted;
  for (const Posted& each : messages) {
    std::byte* const memory = buffer(each.data.bytes, track_of(each.kind));
    posted.push_back(message_for(each, memory));
    if (each.kind.sending) {
      api_.copy(stream, memory + kHead, each.data.data, each.data.bytes);
    }
    if (!streams_meet_) {
      api_.synchronize(stream);
      group_.post(posted.back());
      continue;
    }
    api_.write(stream, address(memory, kArrived), 1);
    const std::lock_guard lock(mutex_);
    gates_.push_back(
        {&word(memory, kArrived), [this, message = posted.back()] { group_.post_late(message); }});
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    std::byte* const memory = posted[i]->data.data - kHead;
    if (streams_meet_) {
      api_.wait_until(stream, address(memory, kOver), kGood);
      results.push_back(&word(memory, kOver));
    } else {
      group_.wait(*posted[i]);
      if (posted[i]->error) std::rethrow_exception(posted[i]->error);
    }
    if (messages[i].kind.sending) continue;
    api_.copy(stream, messages[i].data.data, posted[i]->data.data, messages[i].data.bytes);
    if (!streams_meet_) api_.synchronize(stream);
  }
  return results;
}

}  // namespace ringcomm

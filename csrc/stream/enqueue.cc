// The calls of a DeviceEngine: on the devices where the ranks reach one another there, else through
// memory of the host.

#include "plan/registry.h"
#include "stream/device_engine.h"

namespace ringcomm {
namespace {

// The host times staged operations once the stream reaches them, and kernels time their waits; this
// margin lets the timeout that can tell more come first.
constexpr auto kOwnStream = std::chrono::seconds(1);

// Half of what boards and slots hold: so far behind may a peer be.
constexpr uint32_t kMostUnderWay = cuda::kOperations / 2;

}  // namespace

// Any error but a refusal fails the group: of what was asked for, a part may have been enqueued.
DeviceEngine::CompletionPtr DeviceEngine::guarded(const std::string& asked, auto&& enqueue) {
  const Lock lock(enqueue_mutex_);
  if (gave_up()) check();  // the worker may not have looked yet
  state_.check_usable();   // it may have been closed while this thread waited for the lock
  try {
    const cuda::OnDevice here(api_, device_);
    const bool relaxed = api_.relax_captures(true);
    const Finally restore{[&] { api_.relax_captures(relaxed); }};
    return enqueue();
  } catch (const UsageError&) {
    throw;
  } catch (const cuda::DeviceError& error) {
    std::rethrow_exception(state_.fail(str(asked, ": ", error.what())));
  } catch (const std::exception&) {
    std::rethrow_exception(state_.fail(std::current_exception()));
  }
}

void DeviceEngine::guard(const std::string& asked, const std::function<void()>& call) {
  guarded(asked, [&]() -> CompletionPtr {
    call();
    return nullptr;
  });
}

bool DeviceEngine::connect() {
  bool mapped = false;
  guard("connect", [&] {
    enqueue_mutex_.assert_held();
    bootstrap({subgroup_of(-1)}, "the group's first meeting");
    mapped = reach(-1);
  });
  return mapped;
}

std::optional<Algorithm> DeviceEngine::by_hand(const Operation& operation) const {
  const Shape shape = shape_of(operation);
  const auto asked = state_.requested_algorithm(shape);
  return asked && is_registered(*asked) && same_on_all_ranks(shape) ? asked : std::nullopt;
}

DeviceEngine::CompletionPtr DeviceEngine::enqueue(const Operation& operation, cuda::Stream caller,
                                                  bool on_own_stream, const Finish& finish) {
  validate(operation, state_.size(), state_.rank());
  const std::string asked = to_text(make_descriptor(operation, 0));
  return guarded(asked, [&] {
    enqueue_mutex_.assert_held();
    if (const uint64_t id = api_.capture_of(caller); id != 0) {
      return capture(operation, id, caller, asked, finish);
    }
    bootstrap({subgroup_of(-1)}, asked);
    const cuda::Stream stream = begin({0}, caller, on_own_stream);
    const auto limit = state_.timeout_or(operation.timeout);
    Pending pending{{}, 0, 0, -1, limit, Deadline(limit), {}};
    make_room();
    const auto plan = by_hand(operation);
    if (reach(-1)) {
      look();
      pending.number = ++sequence_;
      pending.operation = make_descriptor(operation, sequence_);
      set_plan(pending.operation, plan ? *plan : kernel_of(operation), 0);
      announce(operation, pending.operation);
    }
    if (reach(-1) && !plan) {
      pending.ticket = recorder_.begin(pending.operation, operation.line);
      run_kernels(operation, stream, false);
    } else {
      if (plan) ++by_hand_;
      pending.result = staging_.run(operation, stream, next_point(0), plan.has_value());
      pending.operation = make_descriptor(operation, staging_.sequence() + sequence());
      pending.deadline = Deadline(limit + kOwnStream);
    }
    finish_in(stream, finish);
    return end({0}, stream, {pending});
  });
}

void DeviceEngine::finish_in(cuda::Stream stream, const Finish& finish) {
  if (!finish) return;
  comm_->flush(stream);
  finish(stream);
}

// Boards and slots hold the last so many operations: more are never under way.
void DeviceEngine::make_room() {
  const std::string during = "the operations before it";
  const uint32_t behind = timelines_[0].issued + 1 - kMostUnderWay;
  poll_until([&] { return reached(0, behind); }, std::chrono::microseconds(20),
             [&] {
               state_.check();
               state_.check_failure(during);
               state_.check_interrupt(during);
             });
}

void DeviceEngine::announce(const Operation& operation, const Descriptor& descriptor) {
  Transport& transport = state_.transport();
  Stamps stamps;
  make_stamps(operation, descriptor, stamps);
  // Of what the lower rank of a pair sends to the higher one, and gets from it.
  const auto stamp = [&](Rank peer) {
    const uint64_t sent = stamps.outgoing(peer, kData), received = stamps.incoming(peer, kData);
    return state_.rank() < peer ? sent * 31 + received : received * 31 + sent;
  };
  for (Rank peer = 0; peer < state_.size(); ++peer) {
    own_.stamp(descriptor.sequence, peer).store(stamp(peer), std::memory_order_relaxed);
  }
  transport.announce(Board::kDevice, descriptor);
  try {
    diagnosis_.check_peers(descriptor);
  } catch (const PeerError&) {
    await_owed(numbered(descriptor));
    throw;
  }
  for (Rank peer = 0; peer < state_.size(); ++peer) {
    if (peer == state_.rank() || !transport.descriptor(peer, Board::kDevice, descriptor.sequence)) {
      continue;
    }
    const cuda::Area theirs = area_of(peer);
    const auto& said = theirs.stamp(descriptor.sequence, state_.rank());
    if (said.load(std::memory_order_relaxed) != stamp(peer)) {
      diagnosis_.throw_mismatch(descriptor, peer);
    }
  }
}

void DeviceEngine::run_kernels(const Operation& operation, cuda::Stream stream, bool captured) {
  const Shape shape = shape_of(operation);
  const uint64_t call = hash_of(make_descriptor(operation, 0)) | 1;  // not 0
  comm_->collective(
      stream,
      {shape, call, make_reduction(operation, state_.size()), Spans(operation.input),
       Spans(operation.output), captured, state_.timeout_or(operation.timeout) + kOwnStream},
      kernel_of(operation));
}

Algorithm DeviceEngine::kernel_of(const Operation& operation) const {
  const Shape shape = shape_of(operation);
  return comm_->kernel_for(shape, state_.requested_kernel(shape));
}

// ---- messages

DeviceEngine::CompletionPtr DeviceEngine::enqueue(const std::vector<DeviceMessage>& messages,
                                                  cuda::Stream caller, const Finish& finish) {
  const std::string asked = to_text(make_descriptor(messages[0].kind));
  return guarded(asked, [&] {
    enqueue_mutex_.assert_held();
    RINGCOMM_CHECK(api_.capture_of(caller) == 0, asked,
                   " cannot be captured into a CUDA graph: messages are matched at each call");
    std::vector<int> timelines;
    std::vector<Pending> pending;
    std::vector<cuda::Transfer> transfers;
    std::vector<cuda::Subgroup> subgroups;
    for (const DeviceMessage& message : messages) {
      const Descriptor descriptor = make_descriptor(message.kind);
      const int timeline = message.timeline();
      if (std::find(timelines.begin(), timelines.end(), timeline) == timelines.end())
        timelines.push_back(timeline);
      const auto limit = state_.timeout_or(message.timeout);
      pending.push_back({descriptor, timeline, 0, message.kind.peer, limit, {}, {}});
      subgroups.push_back(subgroup_of(message.kind.peer));
    }
    bootstrap(subgroups, asked);
    const cuda::Stream stream = begin(timelines, caller, true);
    std::vector<DeviceMessage> staged;
    std::vector<HostStaging::Point> ends;
    for (size_t i = 0; i < messages.size(); ++i) {
      const DeviceMessage& message = messages[i];
      if (reach(message.kind.peer)) {
        announce(pending[i]);
        pending[i].ticket = recorder_.begin(pending[i].operation, message.kind.line);
        transfers.push_back(
            {message.kind.sending, message.kind.peer, message.data, size_of(message.kind.dtype)});
      } else {
        staged.push_back(message);
        ends.push_back(next_point(message.timeline()));
      }
    }
    look();
    if (!transfers.empty()) comm_->transfer(stream, transfers);
    comm_->flush(stream);  // before the stream waits for the host
    const auto results = staging_.post(staged, ends, stream);
    for (size_t i = 0, next = 0; i < pending.size() && !results.empty(); ++i) {
      if (!pending[i].ticket) pending[i].result = results[next++];
    }
    finish_in(stream, finish);
    return end(timelines, stream, std::move(pending));
  });
}

// The k-th message to a peer and its k-th from here are one: they must have one size, one type and
// one tag. As with boards, of the two sides at least one sees what the other has written.
void DeviceEngine::announce(Pending& pending) {
  const bool sending = pending.sending();
  pending.number = ++(sending ? sent_ : received_)[static_cast<size_t>(pending.peer)];
  own_.message(pending.peer, sending, pending.number)
      .store(pending.number << 48 | message_terms(pending.operation), std::memory_order_seq_cst);
  compare(pending);
}

void DeviceEngine::compare(const Pending& pending) const {
  const auto [peer, sending, number] = std::tuple(pending.peer, pending.sending(), pending.number);
  const uint64_t other = area_of(peer).message(state_.rank(), !sending, number).load();
  const uint64_t terms = message_terms(pending.operation);
  if (other >> 48 != (number & 0xffff) || other == (number << 48 | terms)) return;
  const uint64_t bytes = other & kMessageBytes;
  const std::string what =
      bytes == (terms & kMessageBytes) ? "another type or tag" : str(bytes, " bytes");
  throw MismatchError(str(to_text(pending.operation), ": it has ", terms & kMessageBytes,
                          " bytes, and rank ", peer, sending ? " receives " : " sends ", what,
                          ": between devices messages are matched in the order of the calls"));
}

}  // namespace ringcomm

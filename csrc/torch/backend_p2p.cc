// send, recv and monitored_barrier of Backend.
#include "torch/backend.h"
#include "torch/call_parts.h"
#include "torch/errors.h"

namespace ringcomm {
namespace {

using c10d::OpType;

constexpr uint32_t kBarrierTag = 1u << 31;  // users' tags are ints, and not negative

MessagePtr barrier_message(Rank peer, bool sending, Clock::duration timeout) {
  auto message = std::make_shared<Message>(timeout);
  message->peer = peer;
  message->sending = sending;
  message->tag = kBarrierTag;
  return message;
}

uint32_t checked_tag(const Refusal& refuse, int tag) {
  if (tag < 0) refuse("Tag must be nonnegative");
  return static_cast<uint32_t>(tag);
}

void fill_message(Call& call, const Refusal& refuse, const Tensors& tensors, RankAndSize self) {
  if (tensors.size() != 1) refuse("takes a single tensor");
  check_served(refuse, tensors[0]);
  if (*call.peer >= self.size) refuse(str("invalid rank: ", *call.peer));
  if (*call.peer == self.rank) refuse(str("rank ", self.rank, " cannot be its own peer"));
  set_moved_type(call, tensors);
}

// `peer` is Message::kAnySource for a receive from the first that sends.
Call recv_call(const Tensors& tensors, Rank peer, int tag, RankAndSize self) {
  constexpr Refusal refuse{"recv"};
  const bool any = peer == Message::kAnySource;
  Call call(any ? OpType::RECVANYSOURCE : OpType::RECV,
            any ? "ringcomm:recvAnySource" : "ringcomm:recv");
  call.peer = peer;
  call.tag = checked_tag(refuse, tag);
  fill_message(call, refuse, tensors, self);
  call.inputs = call.outputs = tensors;  // torch's profiles show what a receive gets as its input
  add_outputs(call, tensors);
  return call;
}

}  // namespace

Backend::WorkPtr Backend::send(Tensors& tensors, int dstRank, int tag) {
  constexpr Refusal refuse{"send"};
  Call call(OpType::SEND, "ringcomm:send");
  if (dstRank < 0) refuse(str("invalid rank: ", dstRank));
  call.peer = dstRank;
  call.tag = checked_tag(refuse, tag);
  fill_message(call, refuse, tensors, rank_and_size());
  call.inputs = tensors;
  add_inputs(call, tensors);
  return issue(std::move(call));
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int srcRank, int tag) {
  if (srcRank < 0) Refusal{"recv"}(str("invalid rank: ", srcRank));
  return issue(recv_call(tensors, srcRank, tag, rank_and_size()));
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return issue(recv_call(tensors, Message::kAnySource, tag, rank_and_size()));
}

void Backend::post(const c10::intrusive_ptr<Work>& work, Call& call) {
  auto message = std::make_shared<Message>(call.operation.timeout);
  message->sending = call.type == c10d::OpType::SEND;
  message->peer = *call.peer;
  message->tag = call.tag;
  message->dtype = call.operation.dtype;
  message->data = message->sending ? call.operation.input[0] : call.operation.output[0];
  message->on_done = [work](const std::exception_ptr& error) { work->complete(error); };
  work->follow(message);
  try {
    group().post(message);
  } catch (const std::exception&) {
    message->on_done = nullptr;  // it and the work hold one another
    throw;
  }
}

// The barrier is one of the host if the group serves no CUDA. Programs name a device out of habit.
Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& opts) {
  Call call(c10d::OpType::BARRIER, "ringcomm:barrier", Collective::kBarrier);
  call.async = opts.asyncOp;
  if (opts.timeout.count() > 0) call.operation.timeout = opts.timeout;
  std::optional<at::Device> device = opts.device;
  if (!device && !opts.device_ids.empty()) {  // what torch makes of the former
    device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(opts.device_ids[0]));
  }
  if (device && device->is_cuda() && options_->cuda && cuda_is_served()) call.device = device;
  if (!call.device && !opts.asyncOp) await_device();
  return issue(std::move(call));
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  const bool unset = opts.timeout < std::chrono::milliseconds(0);
  const std::chrono::milliseconds timeout = unset ? group().state().timeout() : opts.timeout;
  if (timeout.count() == 0) {
    C10_THROW_ERROR(DistBackendError, str("[Rank ", rank(), "]: Rank ", rank(),
                                          " timed out in monitoredBarrier after 0 ms"));
  }
  with_torch_errors([&] {
    if (rank() == 0) {
      lead_barrier(sane_timeout(timeout), waitAllRanks);
    } else {
      follow_barrier(sane_timeout(timeout));
    }
  });
}

// Whatever ends a barrier halfway ends the group: the next one must not get messages of this one.
void Backend::await(Message& message, Clock::duration at_most) {
  try {
    group().wait(message, at_most);
  } catch (const std::exception& by) {
    group().state().give_up(by, "monitored_barrier");
    throw;
  }
}

void Backend::lead_barrier(std::chrono::milliseconds timeout, bool every_rank) {
  const Deadline deadline(timeout);
  std::vector<MessagePtr> arrivals;
  for (Rank rank = 1; rank < size(); ++rank) {
    arrivals.push_back(barrier_message(rank, false, timeout));
    group().post(arrivals.back());
  }
  std::vector<Rank> missing;
  for (const MessagePtr& arrival : arrivals) {
    await(*arrival, deadline.left());
    if (!arrival->error) continue;
    missing.push_back(arrival->peer);
    if (!every_rank) break;
  }
  if (!missing.empty()) {
    const std::string text = str("[Rank 0]: ", every_rank ? "Ranks " : "Rank ", joined(missing),
                                 " failed to pass monitoredBarrier in ", timeout.count(), " ms");
    group().abort(text);
    C10_THROW_ERROR(DistBackendError, text);
  }
  for (Rank rank = 1; rank < size(); ++rank) {
    const MessagePtr release = barrier_message(rank, true, timeout);
    group().post(release);
    await(*release, timeout);
    if (!release->error) continue;
    std::rethrow_exception(group().state().fail(release->error));
  }
}

void Backend::follow_barrier(std::chrono::milliseconds timeout) {
  const MessagePtr arrival = barrier_message(0, true, timeout);
  const MessagePtr release = barrier_message(0, false, timeout);
  group().post(arrival);
  group().post(release);
  for (const MessagePtr& message : {arrival, release}) {
    await(*message, timeout);
    if (!message->error) continue;
    group().state().fail(message->error);
    std::string why;
    try {
      std::rethrow_exception(message->error);
    } catch (const std::exception& error) {
      why = error.what();
    }
    C10_THROW_ERROR(DistBackendError,
                    str("[Rank ", rank(), "]: Rank ", rank(),
                        " successfully reached monitoredBarrier, but received errors while waiting "
                        "for send/recv from rank 0. Please check rank 0 logs for faulty rank. "
                        "Original exception: ",
                        why));
  }
}

}  // namespace ringcomm

// send, recv and barrier of Backend.
#include "torch/backend.h"

namespace ringcomm {
namespace {

using c10d::OpType;

// A receive from the first that sends has Message::kAnySource as its peer.
Call message_call(OpType type, const char* name, const Tensors& tensors, Rank peer, int tag,
                  RankAndSize self) {
  const bool sends = type == OpType::SEND;
  Call call(type, Collective::kBarrier, sends ? "send" : "recv");
  call.name = name;
  const Refusal& refuse = call.refuse;
  const bool known = peer >= 0 || type == OpType::RECVANYSOURCE;
  if (!known || peer >= self.size) refuse(str("invalid rank: ", peer));
  if (peer == self.rank) refuse(str("rank ", self.rank, " cannot be its own peer"));
  if (tag < 0) refuse("Tag must be nonnegative");
  check_served(refuse, only_one(refuse, tensors));
  call.peer = peer;
  call.tag = static_cast<uint32_t>(tag);
  set_moved_type(call, tensors);
  compare(call.operation, tensors, false);
  call.inputs = tensors;  // torch's profiles show what a receive gets as its input
  if (!sends) call.outputs = tensors;
  sends ? add_inputs(call, tensors) : add_outputs(call, tensors);
  return call;
}

}  // namespace

Backend::WorkPtr Backend::send(Tensors& tensors, int dstRank, int tag) {
  return issue(message_call(OpType::SEND, "send", tensors, dstRank, tag, rank_and_size()));
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int srcRank, int tag) {
  return issue(message_call(OpType::RECV, "recv", tensors, srcRank, tag, rank_and_size()));
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return issue(message_call(OpType::RECVANYSOURCE, "recvAnySource", tensors, Message::kAnySource,
                            tag, rank_and_size()));
}

void Backend::post(const c10::intrusive_ptr<Work>& work, Call& call) {
  auto message = std::make_shared<Message>(call.operation.timeout);
  static_cast<MessageKind&>(*message) = kind_of(call);
  message->data = memory_of(call);
  message->into = call.into;
  message->on_done = [work](const std::exception_ptr& error) { work->complete(error); };
  work->follow(message);
  try {
    call.life->group->messages().post(message);
  } catch (const std::exception&) {
    message->on_done = nullptr;  // it and the work hold one another
    throw;
  }
}

// The barrier is one of the host if the group serves no CUDA. Programs name a device out of habit.
Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& opts) {
  Call call(c10d::OpType::BARRIER, Collective::kBarrier);
  call.async = opts.asyncOp;
  call.operation.timeout = opts.timeout;
  std::optional<at::Device> device = opts.device;
  if (!device && !opts.device_ids.empty()) {  // what torch makes of the former
    device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(opts.device_ids[0]));
  }
  if (device && device->is_cuda() && options_->cuda && cuda_is_served()) call.device = device;
  if (!call.device && !opts.asyncOp) await_device();
  return issue(std::move(call));
}

// Each collective of ours says which ranks it misses: this one is a barrier that blocks, and says
// it in torch's words.
void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  c10d::BarrierOptions blocking = opts;
  blocking.asyncOp = false;
  const auto group = this->group();
  const auto asked = opts.timeout == c10d::kUnsetTimeout ? group->state().timeout() : opts.timeout;
  const bool at_once = asked.count() == 0;  // Gloo, too, has nobody come in no time
  const std::string limit = str(asked.count(), " ms");
  blocking.timeout = at_once ? std::chrono::milliseconds(1) : checked_timeout(asked);
  try {
    if (const WorkPtr work = barrier(blocking)) work->wait();
  } catch (const c10::Error& error) {
    std::vector<Rank> missing;
    for (Rank peer = 1; peer < size() && (waitAllRanks || missing.empty()); ++peer) {
      const PeerState state = group->state().transport().state(peer, Board::kHost);
      if (state.called < group->sequence()) missing.push_back(peer);
    }
    std::string what = str("Rank ", rank(), " timed out in monitoredBarrier after ", limit);
    if (rank() != 0 && !at_once) {
      what = str("Rank ", rank(), " successfully reached monitoredBarrier, but received errors ",
                 "while waiting for send/recv from rank 0");
    } else if (!at_once) {
      if (missing.empty()) throw;  // it is no rank that did not come
      what = str(waitAllRanks ? "Ranks " : "Rank ", joined(missing),
                 " failed to pass monitoredBarrier in ", limit);
    }
    C10_THROW_ERROR(DistBackendError,
                    str("[Rank ", rank(), "]: ", what, ": ", error.what_without_backtrace()));
  }
}

}  // namespace ringcomm

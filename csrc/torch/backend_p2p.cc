// send, recv and barrier of Backend.
#include "torch/backend.h"
#include "torch/call_parts.h"

namespace ringcomm {
namespace {

using c10d::OpType;

void fill_message(Call& call, const Tensors& tensors, int tag, RankAndSize self) {
  const Refusal& refuse = call.refuse;
  if (tag < 0) refuse("Tag must be nonnegative");
  call.tag = static_cast<uint32_t>(tag);
  if (tensors.size() != 1) refuse("takes a single tensor");
  check_served(refuse, tensors[0]);
  if (*call.peer >= self.size) refuse(str("invalid rank: ", *call.peer));
  if (*call.peer == self.rank) refuse(str("rank ", self.rank, " cannot be its own peer"));
  set_moved_type(call, tensors);
}

// `peer` is Message::kAnySource for a receive from the first that sends.
Call recv_call(const Tensors& tensors, Rank peer, int tag, RankAndSize self) {
  const bool any = peer == Message::kAnySource;
  Call call(any ? OpType::RECVANYSOURCE : OpType::RECV,
            any ? "ringcomm:recvAnySource" : "ringcomm:recv", Collective::kBarrier, "recv");
  call.peer = peer;
  fill_message(call, tensors, tag, self);
  call.inputs = call.outputs = tensors;  // torch's profiles show what a receive gets as its input
  add_outputs(call, tensors);
  return call;
}

}  // namespace

Backend::WorkPtr Backend::send(Tensors& tensors, int dstRank, int tag) {
  Call call(OpType::SEND, "ringcomm:send");
  if (dstRank < 0) call.refuse(str("invalid rank: ", dstRank));
  call.peer = dstRank;
  fill_message(call, tensors, tag, rank_and_size());
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
  message->line = call.operation.line;
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

// Each collective of ours says which ranks it misses: this one is a barrier that blocks, and says
// it in torch's words.
void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  c10d::BarrierOptions blocking = opts;
  blocking.asyncOp = false;
  if (opts.timeout.count() < 0) blocking.timeout = group().state().timeout();
  const std::string limit = str(blocking.timeout.count(), " ms");
  if (opts.timeout.count() == 0) blocking.timeout = std::chrono::milliseconds(1);
  try {
    if (const WorkPtr work = barrier(blocking)) work->wait();
  } catch (const c10::Error& error) {
    std::vector<Rank> missing;
    for (Rank peer = 1; peer < size() && (waitAllRanks || missing.empty()); ++peer) {
      const PeerState state = group().state().transport().state(peer, Board::kHost);
      if (state.called < group().sequence()) missing.push_back(peer);
    }
    std::string what = str("Rank ", rank(), " timed out in monitoredBarrier after ", limit);
    if (rank() != 0 && opts.timeout.count() != 0) {
      what = str("Rank ", rank(), " successfully reached monitoredBarrier, but received errors ",
                 "while waiting for send/recv from rank 0");
    } else if (opts.timeout.count() != 0) {
      if (missing.empty()) throw;  // it is no rank that did not come
      what = str(waitAllRanks ? "Ranks " : "Rank ", joined(missing),
                 " failed to pass monitoredBarrier in ", limit);
    }
    C10_THROW_ERROR(DistBackendError,
                    str("[Rank ", rank(), "]: ", what, ": ", error.what_without_backtrace()));
  }
}

}  // namespace ringcomm

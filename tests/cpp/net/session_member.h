// One rank of a simulated group, which checks its results.
#pragma once

#include "session_sim.h"

namespace ringcomm::testing {

struct Totals {
  uint64_t operations = 0, messages = 0, cuts = 0, corrupted = 0, resent = 0, duplicates = 0,
           parked = 0, forgotten = 0, steps = 0;
};

// Writers that need no credit.
class Spendthrift final : public Transport {
 public:
  Spendthrift(Rank rank, std::vector<ShmPeer> here, std::unique_ptr<RemoteRanks> remote_ranks,
              bool credits)
      : Transport(rank, std::move(here), std::move(remote_ranks)), credits_(credits) {}
  uint64_t arrived(Rank peer, int lane, int half) override {
    if (!credits_ && lane == kCredit) return UINT64_MAX;
    return Transport::arrived(peer, lane, half);
  }
  uint64_t stamp(Rank peer, int lane, int half) override {
    if (!credits_ && lane == kCredit) return expected;
    return Transport::stamp(peer, lane, half);
  }

  uint64_t expected = 0;

 private:
  const bool credits_;
};

// It loads from a peer's window: not for a network.
inline bool needs_mapped(const Plan& plan) {
  for (const Step& step : plan.steps) {
    const Ref* sources = plan.refs.data() + step.first_ref + step.dst_count;
    for (uint32_t i = 0; i < step.src_count; ++i) {
      if (sources[i].rank != plan.rank) return true;
    }
  }
  return false;
}

inline Geometry geometry_for(int size, uint64_t slots) {
  Geometry geometry;
  geometry.slots = slots;
  geometry.size = size;
  geometry.segment_bytes = 256;
  geometry.inbox_bytes = 512;
  return geometry;
}

// One group as one rank has it, in one of its lives.
class Member {
 public:
  Member(Rank rank, const Geometry& geometry, int local, const Setup& setup, uint64_t seed)
      : rank_(rank),
        size_(geometry.size),
        local_(local),
        geometry_(geometry),
        setup_(setup),
        shared_(seed) {}

  void open(uint64_t channel, std::vector<ShmPeer> here,
            std::unique_ptr<RemoteRanks> remote_ranks) {
    channel_ = channel;
    transport_ = std::make_unique<Spendthrift>(rank_, std::move(here), std::move(remote_ranks),
                                               setup_.credits);
    executor_ = std::make_unique<HostExecutor>(*transport_, Help(), 16);
    mailbox_ = std::make_unique<Mailbox>(*transport_, recorder_);
    done_ = false;
  }

  bool done() const { return done_; }
  uint64_t channel() const { return channel_; }

  void advance(Totals& totals) {
    if (done_) return;
    mailbox_->progress();
    check_messages();
    for (Rank peer = 0; peer < size_; ++peer) {
      const PeerState state = transport_->state(peer, Board::kHost);
      require(peer == rank_ || !state.left || state.finished >= operations(), "rank ", peer,
              " left early");
    }
    if (!trial_ && number_ == operations()) {
      if (mailbox_->pending()) return;
      transport_->leave();
      done_ = true;
      return;
    }
    if (!trial_) begin();
    const auto status = executor_->advance();
    require(status != HostExecutor::Status::kMismatch, "rank ", rank_, " met another operation");
    if (status == HostExecutor::Status::kBlocked) return;
    transport_->finish(Board::kHost, number_);
    if (setup_.reclaim_lent) transport_->reclaim_lent();
    trial_->check(number_);
    trial_->poison();
    old_.push_back(std::move(trial_));  // freed memory would be another fault than changed memory
    ++totals.operations;
  }

  std::vector<std::unique_ptr<Trial>> old_;
  uint64_t messages = 0;

 private:
  uint64_t operations() const { return static_cast<uint64_t>(setup_.operations); }

  void begin() {
    const Call call = random_call(shared_, size_, 600);
    const uint64_t choice = shared_.next(), talk = shared_.next();
    trial_ = std::make_unique<Trial>(call, size_, rank_);
    ++number_;
    const Operation& operation = trial_->operation;
    Shape shape = make_shape(operation, geometry_);
    shape.local = local_;
    std::vector<std::shared_ptr<const Plan>> plans;
    for (const Algorithm algorithm : algorithms_of(call.collective)) {
      if (algorithm == Algorithm::kHierarchical && local_ == 1) continue;
      auto plan = std::make_shared<Plan>(make_plan(shape, rank_, algorithm));
      bool everywhere = true;  // also where this rank's own plan maps nothing
      for (Rank rank = 0; rank < size_ && everywhere; ++rank) {
        everywhere = call.collective == Collective::kAllToAll ||
                     algorithm == Algorithm::kHierarchical ||
                     !needs_mapped(make_plan(shape, rank, algorithm));
      }
      if (everywhere) plans.push_back(plan);
    }
    require(!plans.empty(), "no plan");
    Descriptor descriptor = make_descriptor(operation, number_);
    make_stamps(operation, descriptor, executor_->stamps());
    transport_->expected = executor_->stamps().common;
    executor_->input().assign(operation.input);
    executor_->output().assign(operation.output);
    transport_->announce(Board::kHost, descriptor);
    executor_->start(plans[choice % plans.size()], setup_.halves ? number_ : 2,
                     make_reduction(operation, size_));
    if (talk % 2 == 0) exchange(talk);
  }

  // A message to the next rank and one from the previous, small or announced.
  void exchange(uint64_t talk) {
    const Rank to = (rank_ + 1) % size_, from = (rank_ + size_ - 1) % size_;
    const size_t bytes = talk / 2 % 5 == 0 ? 20'000 : talk / 2 % 700;
    const auto tag = static_cast<uint32_t>(number_);
    for (const bool sending : {true, false}) {
      auto message = std::make_shared<Message>(std::chrono::hours(1));
      auto& data = data_.emplace_back(bytes, sending ? value(rank_) : std::byte{0});
      message->sending = sending;
      message->peer = sending ? to : from;
      message->tag = tag;
      message->data = {data.data(), data.size()};
      mailbox_->post(message);
      talking_.push_back(message);
      if (sending)
        sources_.push_back(-1);
      else
        sources_.push_back(from);
    }
  }

  std::byte value(Rank rank) const { return static_cast<std::byte>(31 * rank + 5); }

  void check_messages() {
    for (size_t i = 0; i < talking_.size(); ++i) {
      if (!talking_[i] || !talking_[i]->done) continue;
      require(!talking_[i]->error, "a message failed");
      const Span data = talking_[i]->data;
      for (uint64_t b = 0; sources_[i] >= 0 && b < data.bytes; ++b) {
        require(data.data[b] == value(sources_[i]), "rank ", rank_, ": a message's byte ", b);
      }
      std::fill(data.data, data.data + data.bytes, std::byte{0xee});
      talking_[i] = nullptr;
      ++messages;
    }
  }

  const Rank rank_;
  const int size_, local_;
  const Geometry geometry_;
  const Setup& setup_;
  Random shared_;  // the same on every rank
  uint64_t channel_ = 0;
  std::unique_ptr<Spendthrift> transport_;
  std::unique_ptr<HostExecutor> executor_;
  Recorder recorder_;
  std::unique_ptr<Mailbox> mailbox_;
  std::unique_ptr<Trial> trial_;
  uint64_t number_ = 0;
  bool done_ = true;
  std::deque<std::vector<std::byte>> data_;
  std::vector<MessagePtr> talking_;
  std::vector<Rank> sources_;
};

}  // namespace ringcomm::testing

#include "device/handover.h"

namespace ringcomm::cuda {
namespace {

class Run {
 public:
  using Share = Handover::Share;
  using Served = Handover::Served;
  using Pull = Handover::Pull;

  Run(const Peers& peers, StreamWords& words, Stream stream, Handover& work)
      : peers_(peers), words_(words), stream_(stream), work_(work) {}

  void all();

 private:
  void serve(Served& served, uint64_t round);
  void pull(const Pull& pull, uint64_t round);
  void let_go_on(Rank rank, uint64_t round, bool ends);

  const Peers& peers_;
  StreamWords& words_;
  const Stream stream_;
  Handover& work_;
};

// All is given before anything is waited for: others do the same.
void Run::all() {
  for (uint64_t round = 0; round < work_.rounds(); ++round) {
    std::vector<const Share*> given;
    for (const Share& share : work_.shares) {
      if (round < share.rounds && (round == 0 || share.staged())) given.push_back(&share);
    }
    for (const Share* share : given) {
      words_.await_line(share->leader, work_.done(), round == 0 ? kAllDone : round);
      if (round == 0) words_.set_own_line(share->leader, work_.done(), 0);
    }
    for (const StagedOperand& operand : work_.in) stage(words_, stream_, operand, round, false);
    for (const Share* share : given) {
      if (round == 0)
        words_.fill_slot(peers_.slot_of(share->leader, peers_.rank(), work_.messages), share->slot);
      words_.send_line(share->leader, work_.ready(), share->staged() ? round + 1 : share->rounds);
    }
    for (Served& served : work_.served) serve(served, round);
    for (const Pull& pull : work_.pulls) this->pull(pull, round);
    if (work_.out.empty()) continue;
    for (const Share* share : given) words_.await_line(share->leader, work_.done(), round + 1);
    for (const StagedOperand& operand : work_.out) stage(words_, stream_, operand, round, true);
  }
  for (const Share& share : work_.shares) {
    const bool goes_on = work_.messages && share.staged();
    if (!goes_on) words_.await_line(share.leader, work_.done(), kAllDone);
  }
}

void Run::pull(const Pull& pull, uint64_t round) {
  if (round >= pull.rounds) return;
  words_.await_line(pull.from, work_.ready(), round + 1);
  stage(words_, stream_, pull.operand, round, true);
  let_go_on(pull.from, round, round + 1 == pull.rounds);
}

// A rank's operands have served a round.
void Run::let_go_on(Rank rank, uint64_t round, bool ends) {
  if (ends) words_.set_own_line(rank, work_.ready(), 0);
  words_.send_line(rank, work_.done(), ends ? kAllDone : round + 1);
}

void Run::serve(Served& served, uint64_t round) {
  std::vector<Rank> ranks;
  for (Rank rank = 0; rank < peers_.size(); ++rank) {
    if (rank != peers_.rank() && round < served.rounds[static_cast<size_t>(rank)])
      ranks.push_back(rank);
  }
  LeaderArgs& args = served.args;
  for (const Rank rank : ranks) {
    words_.await_line(rank, work_.ready(), round + 1);
    args.slot[rank] = &peers_.slot_of(peers_.rank(), rank, work_.messages);
  }
  args.round = round * args.unit;
  const uint64_t* const first = args.length + args.begin;
  if (std::any_of(first, first + args.parts, [&](uint64_t bytes) { return args.round < bytes; })) {
    words_.launch(stream_, args);
  }
  for (const Rank rank : ranks) {
    let_go_on(rank, round, round + 1 == served.rounds[static_cast<size_t>(rank)]);
  }
}

}  // namespace

void stage(StreamWords& words, Stream stream, const StagedOperand& operand, uint64_t round,
           bool back) {
  const Segments rounds{operand.length, operand.unit};
  const uint64_t first = operand.first + rounds.offset(round), bytes = rounds.length(round);
  const Spans window({{operand.window, operand.unit}});
  back ? words.copy(stream, *operand.spans, first, window, 0, bytes)
       : words.copy(stream, window, 0, *operand.spans, first, bytes);
}

void run(const Peers& peers, StreamWords& words, Stream stream, Handover& work) {
  Run(peers, words, stream, work).all();
}

}  // namespace ringcomm::cuda

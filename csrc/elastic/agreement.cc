#include "elastic/agreement.h"

#include "net/handshake.h"

namespace ringcomm {
namespace {

constexpr auto kLook = std::chrono::milliseconds(1);  // at what wakes nobody: the end of a process
constexpr auto kTellEvery = std::chrono::seconds(10);
constexpr auto kLookAtGuests = std::chrono::milliseconds(20);

// Of `size`: what a peer says may name others, too.
std::vector<Rank> ranks_in(const Members& members, int size) {
  std::vector<Rank> ranks;
  for (Rank rank = 0; rank < size; ++rank) {
    if (members.test(static_cast<size_t>(rank))) ranks.push_back(rank);
  }
  return ranks;
}

// Guests that become members are words with a plus sign, and new guests words with a tilde
// (ringcomm/elastic/epochs.py).
size_t count_in(const std::string& extra, char sign) {
  size_t count = 0;
  TextReader in(extra);
  for (std::string word; in >> word;) count += word.starts_with(sign) ? 1 : 0;
  return count;
}

}  // namespace

Agreement::Agreement(Neighbours& neighbours, const std::string& run, Logger logger)
    : neighbours_(neighbours),
      channel_(channel_of({"ringcomm-elastic", run})),
      logger_(std::move(logger)),
      page_(*reinterpret_cast<SlipPage*>(neighbours.notice())),
      bell_(neighbours.bell()) {}

// ---- epochs

void Agreement::adopt(const Transport& transport, uint32_t epoch, int guests,
                      const Decision& made) {
  if (!decree_ || decree_->slip().epoch != epoch) {
    decree_ = std::make_unique<Decree>(transport.rank(), transport.size() - guests, epoch, made);
  }
  guests_.clear();
  links_.clear();
  for (Rank rank = 0; rank < transport.size(); ++rank) links_.push_back(link_to(transport, rank));
  shown_.clear();
  show();
}

std::shared_ptr<Link> Agreement::link_to(const Transport& transport, Rank rank) {
  if (rank == transport.rank()) return nullptr;
  Wire* const wire = transport.wire(rank);
  if (wire == nullptr) return std::make_shared<LocalLink>(transport.process(rank));
  auto link = remote_[wire].lock();
  if (!link) {
    link = std::make_shared<RemoteLink>(*wire, channel_);
    remote_[wire] = link;
  }
  return link;
}

// Members keep their order, and those that were guests come behind them.
void Agreement::next_epoch(const Answer& answer) {
  const std::string& extra = answer.decision.extra;
  const auto others = std::move(links_);  // they see the decision, too
  links_.clear();
  for (const Rank rank : answer.from) links_.push_back(others[static_cast<size_t>(rank)]);
  auto self = std::ranges::find(answer.from, decree_->rank()) - answer.from.begin();
  const auto members = static_cast<size_t>(decree_->size());
  if (is_guest()) self += decree_->rank() - decree_->size();
  for (size_t i = 0; i < count_in(extra, '+') && members + i < others.size(); ++i) {
    links_.push_back(others[members + i]);
  }
  decree_ = std::make_unique<Decree>(static_cast<int>(self), static_cast<int>(links_.size()),
                                     answer.epoch, answer.decision);
  links_.resize(links_.size() + count_in(extra, '~'));
  if (!answer.stays) decree_->leave();
  show();
  for (const auto& link : links_) {
    if (link) link->begin();
  }
  for (const auto& link : others) {
    if (link && std::ranges::find(links_, link) == links_.end()) link->show(shown_);
  }
}

// ---- agreement

Agreement::Answer Agreement::agree(const Question& question, Clock::duration timeout) {
  RINGCOMM_CHECK(decree_, "no epoch has begun");
  const Deadline patience(question.patience);
  Deadline alone(timeout);
  told_ = kTellEvery;
  if (!decree_->entered() && !is_guest()) {
    decree_->enter(question.decided, question.voted, question.extra, Clock::now());
  }
  while (true) {
    hear();
    take_part(question);
    show();
    if (decree_->decision() || decree_->left_behind()) break;
    give_up_the_awaited(patience);
    if (decree_->awaited().any()) alone = Deadline(timeout);
    if (alone.passed()) throw too_few(patience);
    tell_who_is_awaited(patience);
    question.interrupt();
    sleep(kLook);
  }
  Answer answer;
  answer.epoch = decree_->slip().epoch + 1;
  if (!decree_->decision()) return answer;
  answer.decision = *decree_->decision();
  answer.from = ranks_in(answer.decision.members, decree_->size());
  answer.stays = is_guest() ? count_in(answer.decision.extra, '+') > 0
                            : answer.decision.members.test(static_cast<size_t>(decree_->rank()));
  next_epoch(answer);
  return answer;
}

void Agreement::take_part(const Question& question) {
  if (is_guest()) {
    if ((decree_->dead() | decree_->suspected()).count() < static_cast<size_t>(decree_->size())) {
      return;
    }
    throw PeerError(0, "every member of the world died before this rank was one of them");
  }
  decree_->tick(Clock::now());
  const auto request = decree_->asks();
  if (!request || !question.witness) return;
  if (const auto answer = question.witness(*request)) decree_->hear_witness(*answer, Clock::now());
}

void Agreement::hear() {
  const auto now = Clock::now();
  Members dead, suspected;
  for (size_t rank = 0; rank < static_cast<size_t>(decree_->size()); ++rank) {
    if (!links_[rank]) continue;
    // What a process has shown before its end counts: so look at its fate first.
    const Link::Fate fate = links_[rank]->fate();
    if (const auto slip = links_[rank]->read()) {
      decree_->hear(static_cast<int>(rank), *slip, now);
    }
    if (fate == Link::Fate::kDead) dead.set(rank);
    if (fate == Link::Fate::kSuspected) suspected.set(rank);
  }
  decree_->suspect(suspected, now);
  decree_->bury(dead, now);
}

// One whom another member has given up gets no more patience from this one: else those with less of
// it would wait for the others.
void Agreement::give_up_the_awaited(const Deadline& patience) {
  Members given_up;
  if (patience.passed()) given_up.set();
  for (Rank rank = 0; rank < decree_->size(); ++rank) {
    const Slip& slip = decree_->heard(rank);
    if (slip.state == Slip::State::kMeeting) given_up |= slip.gone;
  }
  for (const Rank rank : ranks_in(decree_->awaited() & given_up, decree_->size())) {
    links_[static_cast<size_t>(rank)]->give_up();
  }
}

void Agreement::show() {
  auto bytes = to_bytes(decree_->slip());
  if (bytes == shown_) return;
  shown_ = std::move(bytes);
  page_.write(shown_);
  for (const auto& link : links_) {
    if (link) link->show(shown_);
  }
}

void Agreement::sleep(Clock::duration most) {
  const auto news = [this] {
    return std::ranges::any_of(links_, [](const auto& link) { return link && link->has_news(); });
  };
  bell_.sleep(kAllNews, news, most);
}

void Agreement::tell_who_is_awaited(const Deadline& patience) {
  if (patience.elapsed() < told_) return;
  told_ += kTellEvery;
  for (const Rank rank : ranks_in(decree_->awaited(), decree_->size())) {
    const auto& link = links_[static_cast<size_t>(rank)];
    logger_.warning("waiting ", to_seconds(patience.elapsed()), " s for rank ", rank,
                    " to end its step: it is ", link ? link->condition() : "not connected");
  }
}

TimeoutError Agreement::too_few(const Deadline& patience) {
  const Members gone = decree_->suspected();
  return TimeoutError(str("cut off from ", gone.count(), " of ", decree_->size(),
                          " ranks, and the others were no majority within ",
                          to_seconds(patience.elapsed()),
                          " s: others may go on without this rank, so it stops"));
}

// ---- the next group

void Agreement::check_members() {
  hear();
  const uint32_t epoch = decree_->slip().epoch;
  for (size_t rank = 0; rank < static_cast<size_t>(decree_->size()); ++rank) {
    const auto self = static_cast<Rank>(rank);
    const Slip& slip = decree_->heard(self);
    const bool gone = decree_->slip().gone.test(rank);
    if (gone || slip.state != Slip::State::kWorking) {
      throw PeerError(self, str("rank ", self, gone ? " died" : " gave up",
                                " while the group of epoch ", epoch, " was being made"));
    }
  }
  if (decree_->decision() || decree_->left_behind()) {
    throw PeerError(decree_->rank(), str("the others have left epoch ", epoch, " already"));
  }
  if (guests_.empty() || Clock::now() - looked_ < kLookAtGuests) return;
  looked_ = Clock::now();
  for (const Card& guest : guests_) {
    if (!neighbours_.is_gone(guest.socket)) continue;
    throw PeerError(decree_->rank(), str("process ", guest.pid, " died before it had joined"));
  }
}

void Agreement::expect(const std::vector<std::string>& guests) {
  const Card mine = neighbours_.card();
  guests_.clear();
  for (const std::string& text : guests) {
    Card card = Card::from_text(text, 0);
    if (card.shares_host(mine)) guests_.push_back(std::move(card));
  }
}

std::unique_ptr<Store> Agreement::store() const {
  if (links_.size() > static_cast<size_t>(decree_->size())) return nullptr;
  std::vector<Way> ways;
  for (const auto& link : links_) ways.push_back(link ? link->way() : Way{});
  const uint64_t channel = channel_of({"epoch", str(channel_), str(decree_->slip().epoch)});
  return std::make_unique<SocketStore>(neighbours_, decree_->rank(), ways, channel);
}

}  // namespace ringcomm

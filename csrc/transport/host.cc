#include "transport/host.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "net/handshake.h"

namespace ringcomm {
namespace {

constexpr size_t kMostAsked = 2000;    // letters of an algorithm, as plan/rules.cc has it
constexpr int64_t kMostPid = 1 << 22;  // PID_MAX_LIMIT of Linux
constexpr const char* kNone = "-";     // in the place of a word that is empty

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line.empty() ? HostIdentity::kUnknown : line;
}

std::string network_namespace() {
  struct stat status{};
  if (::stat("/proc/self/ns/net", &status) != 0) return HostIdentity::kUnknown;
  return str(status.st_dev, ":", status.st_ino);
}

bool is_known(const std::string& what) { return what != HostIdentity::kUnknown; }

bool may_equal(const std::string& a, const std::string& b) {
  return a == b || !is_known(a) || !is_known(b);
}

}  // namespace

bool HostIdentity::same_host(const HostIdentity& other) const {
  return is_known(boot_id) && boot_id == other.boot_id && is_known(network) &&
         network == other.network && user == other.user;
}

bool HostIdentity::may_share_network(const HostIdentity& other) const {
  return may_equal(boot_id, other.boot_id) && may_equal(network, other.network);
}

HostIdentity host_identity() {
  // Without descriptors nothing could be read, and everything would be unknown.
  if (!Fd(::open("/", O_PATH | O_CLOEXEC))) throw SystemError("looking at this host");
  return {first_line("/proc/sys/kernel/hostname"), first_line("/proc/sys/kernel/random/boot_id"),
          network_namespace(), ::geteuid()};
}

std::string why_apart(const std::vector<Card>& cards, Rank first, Rank second) {
  const Card& a = cards[static_cast<size_t>(first)];
  const Card& b = cards[static_cast<size_t>(second)];
  if (a.tcp || b.tcp || !a.may_share_network(b) || a.shares_host(b)) return "";
  for (const Rank rank : {first, second}) {
    const Card& card = cards[static_cast<size_t>(rank)];
    if (!is_known(card.boot_id)) {
      return str("rank ", rank, " cannot read /proc/sys/kernel/random/boot_id");
    }
    if (!is_known(card.network)) return str("rank ", rank, " cannot read /proc/self/ns/net");
  }
  return str("rank ", first, " runs as user ", a.user, " and rank ", second, " as user ", b.user);
}

int Whereabouts::hosts() const {
  return host_of.empty() ? 1 : 1 + *std::ranges::max_element(host_of);
}

int Whereabouts::ranks_beside(Rank rank) const {
  const int here = host_of[static_cast<size_t>(rank)];
  return static_cast<int>(std::ranges::count(host_of, here));
}

int Whereabouts::most_ranks() const {
  std::vector<int> ranks(static_cast<size_t>(hosts()));
  for (const int host : host_of) ++ranks[static_cast<size_t>(host)];
  return std::max(1, std::ranges::max(ranks));
}

std::string Whereabouts::text(Rank rank) const {
  if (pids.empty()) return "";
  const auto host = static_cast<size_t>(host_of[static_cast<size_t>(rank)]);
  return str("pid ", pids[static_cast<size_t>(rank)], " on ", names[host]);
}

Card make_card() {
  Card card;
  static_cast<HostIdentity&>(card) = host_identity();
  card.build = RINGCOMM_BUILD;
  const auto name = random_id();
  card.socket = str("ringcomm-", name[0], "-", name[1]);
  card.pid = ::getpid();
  card.nonce = random_id();
  return card;
}

void require_agreement(const std::vector<Card>& cards) {
  const Card& first = cards[0];
  for (size_t rank = 1; rank < cards.size(); ++rank) {
    const Card& other = cards[rank];
    if (other.build != first.build) {
      throw PeerError(static_cast<Rank>(rank),
                      str("rank 0 on ", first.host, " has build ", first.build,
                          " of ringcomm, and rank ", rank, " on ", other.host, " has build ",
                          other.build, ": install the same version everywhere"));
    }
    RINGCOMM_CHECK(other.algorithm.empty() || other.algorithm == first.algorithm,
                   "rank 0 asks for ",
                   first.algorithm.empty() ? "no algorithm" : "the algorithm " + first.algorithm,
                   ", and rank ", rank, " for the algorithm ", other.algorithm,
                   ": give every rank the same RINGCOMM_ALGORITHM, or the same Options");
  }
}

void refuse_own(const std::vector<Address>& theirs, const std::vector<Address>& own, Rank peer) {
  for (const Address& address : theirs) {
    const auto same = [&](const Address& mine) { return mine.same_host(address); };
    if (!address.is_loopback() && std::ranges::none_of(own, same)) return;
  }
  throw UsageError(str("rank ", peer, " listens at ", theirs[0].to_text(),
                       ", an address that this host, which is another one, has as well: choose an "
                       "interface between them with RINGCOMM_IFNAME"));
}

bool is_stopped(pid_t process) {
  const std::string line = first_line(str("/proc/", process, "/stat").c_str());
  const size_t name_end = line.rfind(')');  // the state follows the name, which may hold anything
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return false;
  return line[name_end + 2] == 'T' || line[name_end + 2] == 't';
}

std::string Card::to_text() const {
  return str(build, ' ', algorithm.empty() ? kNone : algorithm, ' ', host, ' ', boot_id, ' ',
             network, ' ', socket, ' ', pid, ' ', user, ' ', nonce[0], ' ', nonce[1], ' ', before,
             ' ', tcp ? "tcp" : "any");
}

Card Card::from_text(const std::string& text, Rank owner) {
  TextReader in(text);
  std::string transport;
  Card card;
  in >> card.build >> card.algorithm >> card.host >> card.boot_id >> card.network >> card.socket >>
      card.pid >> card.user >> card.nonce[0] >> card.nonce[1] >> card.before >> transport;
  card.tcp = transport == "tcp";
  if (card.algorithm == kNone) card.algorithm.clear();
  const size_t longest = std::max({card.build.size(), card.host.size(), card.socket.size()});
  const bool pid_fits = card.pid >= 0 && card.pid <= kMostPid;
  if (!in || longest > 100 || !pid_fits || card.algorithm.size() > kMostAsked) {
    throw PeerError(owner, str("rank ", owner, " introduces itself as '", text.substr(0, 40),
                               "', which this version of ringcomm does not understand: install "
                               "the same version everywhere"));
  }
  return card;
}

}  // namespace ringcomm

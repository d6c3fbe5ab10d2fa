#include "transport/host.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <fstream>

#include "net/handshake.h"
#include "transport/unix_socket.h"

namespace ringcomm {
namespace {

constexpr const char* kCardVersion = "ringcomm-card-1";

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line.empty() ? "unknown" : line;
}

std::string network_namespace() {
  struct stat status{};
  if (::stat("/proc/self/ns/net", &status) != 0) return "unknown";
  return str(status.st_dev, ":", status.st_ino);
}

}  // namespace

Card make_card() {
  Card card;
  card.host = first_line("/proc/sys/kernel/hostname");
  card.boot_id = first_line("/proc/sys/kernel/random/boot_id");
  card.network = network_namespace();
  const ProcessId name = random_id();
  card.socket = "ringcomm-" + to_hex(name.data(), name.size());
  card.pid = ::getpid();
  card.nonce = std::bit_cast<Nonce>(random_id());
  return card;
}

void refuse_loopback(const Address& told, Rank self, const std::vector<Card>& cards) {
  const Card& mine = cards[static_cast<size_t>(self)];
  const auto elsewhere = [&](const Card& other) { return !other.shares_host(mine); };
  if (!told.is_loopback() || std::none_of(cards.begin(), cards.end(), elsewhere)) return;
  throw UsageError(str("rank ", self, " listens at ", told.to_text(),
                       " on lo alone, where no other host reaches it: choose another interface "
                       "with RINGCOMM_IFNAME (`ip -br address` lists those of ",
                       mine.host, ")"));
}

void refuse_own(const std::vector<Address>& theirs, const std::vector<Address>& own, Rank peer) {
  for (const Address& one : theirs) {
    if (std::none_of(own.begin(), own.end(), [&](const auto& mine) { return mine.same_host(one); }))
      return;
  }
  throw UsageError(str("rank ", peer, " listens at ", theirs[0].to_text(),
                       ", an address that this host, which is another one, has as well: choose an "
                       "interface between them with RINGCOMM_IFNAME"));
}

bool peer_is_stopped(const Fd& socket) {
  const std::string line = first_line(str("/proc/", owner_of_peer(socket).pid, "/stat").c_str());
  const size_t name_end = line.rfind(')');  // the state follows the name, which may hold anything
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return false;
  return line[name_end + 2] == 'T' || line[name_end + 2] == 't';
}

std::string Card::to_text() const {
  return str(kCardVersion, ' ', host, ' ', boot_id, ' ', network, ' ', socket, ' ', pid, ' ',
             nonce.words[0], ' ', nonce.words[1], ' ', tcp ? "tcp" : "any");
}

Card Card::from_text(const std::string& text, Rank owner) {
  std::istringstream in(text);
  std::string version, transport;
  Card card;
  in >> version >> card.host >> card.boot_id >> card.network >> card.socket >> card.pid >>
      card.nonce.words[0] >> card.nonce.words[1] >> transport;
  card.tcp = transport == "tcp";
  if (!in || version != kCardVersion || card.socket.size() > 100) {
    throw PeerError(owner, str("rank ", owner, " introduces itself as '", text.substr(0, 40),
                               "', which this version of ringcomm does not understand: install "
                               "the same version everywhere"));
  }
  return card;
}

}  // namespace ringcomm

#include "transport/unix_socket.h"

#include <fcntl.h>
#include <sys/un.h>

namespace ringcomm {
namespace {

struct Address {
  sockaddr_un name{};
  socklen_t length = 0;
};

// A leading zero byte puts the name outside the file system: nothing to clean up.
Address abstract_address(const std::string& text) {
  Address address;
  address.name.sun_family = AF_UNIX;
  RINGCOMM_CHECK(text.size() < sizeof address.name.sun_path - 1, "socket name too long: ", text);
  std::memcpy(address.name.sun_path + 1, text.data(), text.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return address;
}

Fd make_socket(int flags = 0) {
  // SEQPACKET keeps message boundaries: a message comes whole or not at all.
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  if (!fd) throw SystemError("socket(AF_UNIX)");
  return fd;
}

bool same_user(const Fd& socket) { return owner_of_peer(socket).uid == ::geteuid(); }

// The kernel drops descriptors that it cannot hand over, and does not say why.
int why_lost(const Fd& socket) {
  const Fd another(::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
  return another ? EACCES : errno;
}

}  // namespace

ucred owner_of_peer(const Fd& socket) {
  ucred peer{-1, static_cast<uid_t>(-1), static_cast<gid_t>(-1)};
  socklen_t length = sizeof peer;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length);
  return peer;
}

Fd listen_unix(const std::string& abstract_name, int backlog) {
  const Address address = abstract_address(abstract_name);
  Fd fd = make_socket(SOCK_NONBLOCK);
  const auto* name = reinterpret_cast<const sockaddr*>(&address.name);
  if (::bind(fd.get(), name, address.length) != 0) throw SystemError("bind(AF_UNIX)");
  if (::listen(fd.get(), backlog) != 0) throw SystemError("listen(AF_UNIX)");
  return fd;
}

Fd connect_unix(const std::string& abstract_name) {
  const Address address = abstract_address(abstract_name);
  Fd fd = make_socket(SOCK_NONBLOCK);
  const auto* name = reinterpret_cast<const sockaddr*>(&address.name);
  while (::connect(fd.get(), name, address.length) != 0) {
    if (errno != EINTR) throw SystemError("connect(AF_UNIX)");
  }
  if (!same_user(fd)) throw SystemError("the peer belongs to another user", EPERM);
  return fd;
}

Fd accept_unix(const Fd& listener) {
  while (true) {
    Fd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd && same_user(fd)) return fd;
    if (fd || errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN) return Fd();
    throw SystemError("accept(AF_UNIX)");
  }
}

bool send_message(const Fd& socket, std::span<const std::byte> bytes, std::span<const int> fds,
                  int flags) {
  RINGCOMM_CHECK(fds.size() <= kMostFds, "a message carries at most ", kMostFds, " descriptors");
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::byte control[CMSG_SPACE(kMostFds * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(head), fds.data(), fds.size_bytes());
  }
  while (::sendmsg(socket.get(), &message, MSG_NOSIGNAL | flags) < 0) {
    // Too many descriptors under way: some have to be taken first.
    if (flags != 0 && (errno == EAGAIN || errno == ETOOMANYREFS)) return false;
    if (errno != EINTR) throw SystemError("sendmsg(AF_UNIX)");
  }
  return true;
}

Received try_receive(const Fd& socket, std::span<std::byte> bytes, std::vector<Fd>& fds) {
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::byte control[CMSG_SPACE(kMostFds * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = 0;
  while ((got = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT)) < 0) {
    if (errno == EAGAIN) return Received::kNothing;
    if (errno == ECONNRESET) return Received::kClosed;
    if (errno != EINTR) throw SystemError("recvmsg(AF_UNIX)");
  }
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr;
       head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(head) + i * sizeof(int), sizeof fd);
      fds.emplace_back(fd);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0)
    throw SystemError("receiving a descriptor", why_lost(socket));
  return got == static_cast<ssize_t>(bytes.size()) ? Received::kMessage : Received::kClosed;
}

}  // namespace ringcomm

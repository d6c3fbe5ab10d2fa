#include "transport/unix_socket.h"

#include <fcntl.h>
#include <sys/un.h>

namespace ringcomm {
namespace {

struct Address {
  sockaddr_un name{};
  socklen_t length = 0;
  const sockaddr* native() const { return reinterpret_cast<const sockaddr*>(&name); }
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
  if (::bind(fd.get(), address.native(), address.length) != 0) throw SystemError("bind(AF_UNIX)");
  if (::listen(fd.get(), backlog) != 0) throw SystemError("listen(AF_UNIX)");
  return fd;
}

Fd connect_unix(const std::string& abstract_name) {
  const Address address = abstract_address(abstract_name);
  Fd fd = make_socket(SOCK_NONBLOCK);
  while (::connect(fd.get(), address.native(), address.length) != 0) {
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

bool send_message(const Fd& socket, std::span<const std::byte> bytes, const Fd& descriptor) {
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::byte control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (const int fd = descriptor.get(); fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(head), &fd, sizeof fd);
  }
  while (::sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    // Too many descriptors under way: some have to be taken first.
    if (errno == EAGAIN || errno == ETOOMANYREFS) return false;
    if (errno != EINTR) throw SystemError("sendmsg(AF_UNIX)");
  }
  return true;
}

Received try_receive(const Fd& socket, std::span<std::byte> bytes, Fd& descriptor) {
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::byte control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_LEN(sizeof(int));  // for one: the kernel closes any more
  ssize_t got = 0;
  while ((got = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT)) < 0) {
    if (errno == EAGAIN) return Received::kNothing;
    if (errno == ECONNRESET) return Received::kClosed;
    if (errno != EINTR) throw SystemError("recvmsg(AF_UNIX)");
  }
  if (cmsghdr* head = CMSG_FIRSTHDR(&message); head && head->cmsg_type == SCM_RIGHTS) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(head), sizeof fd);
    descriptor = Fd(fd);
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0)
    throw SystemError("receiving a descriptor", why_lost(socket));
  return got == static_cast<ssize_t>(bytes.size()) ? Received::kMessage : Received::kClosed;
}

}  // namespace ringcomm

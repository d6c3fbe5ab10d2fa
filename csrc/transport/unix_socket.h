// Abstract Unix sockets with deadlines: connect, accept, and messages that carry descriptors.
#pragma once

#include <sys/socket.h>

#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"

namespace ringcomm {

// Who runs the process at the other end; ids of -1 where that is not known.
ucred owner_of_peer(const Fd& socket);

Fd listen_unix(const std::string& abstract_name, int backlog);
// Throws SystemError at once: EAGAIN when the listener has no room, ECONNREFUSED when it is gone.
Fd connect_unix(const std::string& abstract_name);
// An empty Fd when nobody came before the deadline. Connections of other users are refused.
Fd accept_unix(const Fd& listener, const Deadline& deadline);

// False when the deadline passed.
bool wait_readable(const Fd& fd, const Deadline& deadline);
inline constexpr size_t kMostFds = 16;  // of one message
// One message of fixed size with its descriptors. send throws SystemError; receive returns false at
// EOF, and throws TimeoutError at the deadline.
void send_message(const Fd& socket, std::span<const std::byte> bytes, std::span<const int> fds);
bool receive_message(const Fd& socket, std::span<std::byte> bytes, std::vector<Fd>& fds,
                     const Deadline& deadline);

}  // namespace ringcomm

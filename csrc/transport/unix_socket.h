// Abstract Unix sockets: connect, accept, and messages that carry descriptors.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <span>
#include <string>

#include "base/fd.h"

namespace ringcomm {

// Returns the user and the process at the other end; ids of -1 where they are not known.
ucred owner_of_peer(const Fd& socket);

Fd listen_unix(const std::string& abstract_name, int backlog);
// Connects, or throws SystemError at once: EAGAIN when the listener has no room, ECONNREFUSED when
// it is gone.
Fd connect_unix(const std::string& abstract_name);
// Accepts a connection, or returns an empty Fd when none has come. Refuses other users.
Fd accept_unix(const Fd& listener);

// Send and receive one message of fixed size, with a descriptor where that is not empty. Both throw
// SystemError: receiving, also where the descriptor did not come because this process has no room
// for it; the bytes are there then. Sending does not wait for room, and returns false if there is
// none now.
bool send_message(const Fd& socket, std::span<const std::byte> bytes, const Fd& descriptor);
enum class Received : uint8_t { kNothing, kMessage, kClosed };
Received try_receive(const Fd& socket, std::span<std::byte> bytes, Fd& descriptor);

}  // namespace ringcomm

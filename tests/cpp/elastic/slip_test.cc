// Slips: as bytes, from strangers, and in memory that one process writes while others read.
#include <cstring>
#include <thread>

#include "cpp/harness.h"
#include "elastic/link.h"
#include "net/checksum.h"

namespace ringcomm::testing {
namespace {

Slip random_slip(Random& random) {
  const auto members = [&] {
    Members some;
    for (size_t rank = 0; rank < kMostMembers; ++rank) some.set(rank, random.below(3) == 0);
    return some;
  };
  const auto decision = [&] {
    return Decision{members(), random.next(), std::string(random.below(40), '+')};
  };
  Slip slip;
  slip.epoch = static_cast<uint32_t>(random.next());
  slip.state = static_cast<Slip::State>(random.below(3));
  slip.voted = random.below(2) == 0;
  slip.decided = random.next();
  slip.gone = members();
  slip.ended = members();
  slip.promised = random.next();
  slip.ballot = random.next();
  slip.proposes = random.below(2) == 0;
  slip.proposal = decision();
  slip.accepted = random.next();
  slip.value = decision();
  slip.made = decision();
  return slip;
}

void any_slip_is_read_as_it_was_written() {
  Random random(1);
  for (int i = 0; i < 2000; ++i) {
    const Slip slip = random_slip(random);
    const auto read = slip_from(to_bytes(slip));
    require(read && *read == slip, "slip ", i, " was read as another one");
  }
}

void changed_bytes_are_no_slip() {
  Random random(2);
  for (int i = 0; i < 20000; ++i) {
    auto bytes = to_bytes(random_slip(random));
    if (random.below(2) == 0) {
      bytes[random.below(bytes.size())] ^= std::byte{static_cast<uint8_t>(1 + random.below(255))};
    } else {
      bytes.resize(random.below(bytes.size()));
    }
    require(!slip_from(bytes), "changed bytes were taken for a slip: ", i);
  }
}

// A stranger may know the checksum, but none of its slips is read beyond the bytes.
void nonsense_with_a_good_checksum_is_harmless() {
  Random random(3);
  for (int i = 0; i < 20000; ++i) {
    auto bytes = to_bytes(random_slip(random));
    const size_t body = bytes.size() - 4;
    for (uint64_t n = 0; n < 1 + random.below(4); ++n) {
      bytes[random.below(body)] = std::byte{static_cast<uint8_t>(random.next())};
    }
    const uint32_t sum = checksum(bytes.data(), body);
    std::memcpy(bytes.data() + body, &sum, sizeof sum);
    if (const auto slip = slip_from(bytes)) to_bytes(*slip);
  }
}

void a_slip_that_is_too_long_is_refused() {
  Slip slip;
  slip.made.extra.assign(kSlipBytes, 'w');
  try {
    to_bytes(slip);
  } catch (const UsageError&) {
    return;
  }
  throw Failure("a slip of more bytes than there is room for");
}

// A reader gets whole slips only, and the numbers in them never go back.
void readers_see_whole_slips() {
  auto page = std::make_unique<SlipPage>();
  std::atomic<bool> over{false};
  std::thread writer([&] {
    for (uint64_t i = 1; i <= 20000; ++i) {
      Slip slip;
      slip.decided = i;
      slip.made.extra.assign(i % 1000, 'w');
      page->write(to_bytes(slip));
    }
    over = true;
  });
  uint32_t seen = 0;
  uint64_t last = 0, count = 0;
  while (!over || last < 20000) {
    const auto bytes = page->read(seen);
    if (!bytes) continue;
    const auto slip = slip_from(*bytes);
    require(slip.has_value(), "half a slip was read");
    require(slip->decided > last && slip->made.extra.size() == slip->decided % 1000, "an old slip");
    last = slip->decided;
    ++count;
  }
  writer.join();
  require(count > 0, "nothing was read");
}

// A process may be killed at any word that it writes.
void a_writer_that_dies_leaves_its_last_slip() {
  auto page = std::make_unique<SlipPage>();
  Slip slip;
  for (uint64_t i = 1; i <= 4; ++i) {
    slip.decided = i;
    page->write(to_bytes(slip));
    auto& next = page->slots[(page->version + 1) % 2];
    next.bytes = kSlipBytes;
    for (auto& word : next.words) word = i;
    uint32_t seen = 0;
    const auto bytes = page->read(seen);
    const auto read = bytes ? slip_from(*bytes) : std::nullopt;
    require(read && read->decided == i, "slip ", i, " is not what a dead writer has left");
  }
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"any slip is read as it was written", any_slip_is_read_as_it_was_written},
                     {"changed bytes are no slip", changed_bytes_are_no_slip},
                     {"nonsense is harmless", nonsense_with_a_good_checksum_is_harmless},
                     {"a slip that is too long is refused", a_slip_that_is_too_long_is_refused},
                     {"readers see whole slips", readers_see_whole_slips},
                     {"a writer that dies", a_writer_that_dies_leaves_its_last_slip}},
                    argc, argv);
}

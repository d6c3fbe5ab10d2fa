// Fuzz target: one rank of three, and what a peer on another host may send it: frames for any place
// of its memory, words about itself, and messages, while this rank sends and receives some of its
// own. Nothing is written but what is that peer's to write, no buffer is touched once its message
// is complete, and each message completes once.
#include <cstdlib>
#include <memory>

#include "fuzz_driver.h"
#include "message/mailbox.h"
#include "transport/transport.h"

namespace ringcomm::testing {
namespace {

constexpr Rank kSelf = 0, kPeer = 1;
constexpr int kRanks = 3;
constexpr uint64_t kInbox = 512, kRing = 4096;
constexpr auto kSentByte = std::byte{0x5a};

class Memory {
 public:
  explicit Memory(uint64_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(SegmentLayout::kPage, bytes))) {
    require(data_ != nullptr, "no memory");
    std::memset(data_.get(), 0, bytes);
  }
  std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

// Goes nowhere; looks into the byte stream that would have gone.
class Outside final : public Wire {
 public:
  void open(uint64_t, Receiver*) override {}
  void close(uint64_t) override {}
  void post(const Frame& frame, Payload payload) override {
    if (frame.type != FrameType::kStream) return;
    written = frame.stamp;
    for (const std::byte byte : std::span(payload.data(), frame.bytes)) follow(byte);
  }
  void reclaim_lent(uint64_t) override {}
  void flush() override {}
  bool reached() override { return true; }
  uint64_t undelivered() override { return 0; }
  void need() override {}
  bool lost() override { return false; }
  std::string condition() override { return "alive"; }

  uint64_t written = 0;

 private:
  void follow(std::byte byte) {
    if (header_.size() < 32) return header_.push_back(byte);
    if (body_ == 0) std::memcpy(&body_, header_.data() + 12, sizeof body_);
    if (body_ == 0) {
      header_.assign(1, byte);
      return;
    }
    require(byte == kSentByte, "a message holds what nobody sends");
    if (--body_ == 0) header_.clear();
  }
  std::vector<std::byte> header_;
  uint32_t body_ = 0;
};

struct Words {  // the header of a message: Mailbox::Frame
  uint32_t kind = 0, tag = 0, dtype = 0, body = 0;
  uint64_t id = 0, bytes = 0;
};

class World {
 public:
  explicit World(Input& input)
      : input_(input), own_memory_(layout().bytes()), before_(pair_layout().bytes()) {
    const Segment own(own_memory_.data(), layout());
    std::vector<ShmPeer> here(1);
    here[0].rank = kSelf;
    here[0].segment = own;
    here[0].doorbell = Doorbell(&bell_);
    auto remote_ranks = std::make_unique<RemoteRanks>(kRanks);
    for (Rank rank = 0; rank < kRanks; ++rank) {
      if (rank == kSelf) continue;
      const RemotePeer::Ends ends{rank, &own.header(), pair_layout(), remote_ranks.get()};
      Wire& wire = rank == kPeer ? outside_ : nowhere_;
      remote_ranks->add(std::make_unique<RemotePeer>(wire, 1, ends));
      if (rank == kPeer) remote_ = remote_ranks->find(rank);
    }
    received_ = remote_->received().get();
    own_header_.resize(sizeof(Header));
    std::memcpy(own_header_.data(), own_memory_.data(), sizeof(Header));
    transport_ = std::make_unique<Transport>(kSelf, std::move(here), std::move(remote_ranks));
    mailbox_ = std::make_unique<Mailbox>(*transport_, recorder_);
  }

  void run() {
    for (int step = 0; step < 300 && !input_.empty(); ++step) {
      switch (input_.below(7)) {
        case 0:
          take_frame();
          break;
        case 1:
        case 2:
          take_message();
          break;
        case 3:
          post(true);
          break;
        case 4:
          post(false);
          break;
        case 5:
          withdraw();
          break;
        default:
          deliver(FrameType::kCredit, outside_.written);  // it has read all
      }
      move();
    }
    mailbox_->fail_all(std::make_exception_ptr(Failure("the end")));
    for (const auto& posted : posted_) require(posted->completions == 1, "a message is forgotten");
    look_at_peer();
  }

 private:
  static SegmentLayout layout() { return {1, 0, kInbox, kRing}; }
  static SegmentLayout pair_layout() {
    return {1, 0, without("bounds") ? 2 * kInbox : kInbox, kRing};
  }

  // ---- frames

  std::vector<std::span<std::byte>> peers_to_write() const {
    std::vector<std::span<std::byte>> all;
    for (int half = 0; half < 2; ++half) {
      all.emplace_back(received_.inbox(0, half), kInbox);
      for (int lane = 0; lane < kLineLanes; ++lane) {
        auto* line = reinterpret_cast<std::byte*>(&received_.line(0, lane, half));
        all.emplace_back(line, lane == 0 ? sizeof(Line) : sizeof(Line) - kLinePayload);
      }
    }
    auto* ring = reinterpret_cast<std::byte*>(&received_.mailbox(0));
    all.emplace_back(ring, sizeof(MailboxCursors) + kRing);
    return all;
  }

  void check_memory() {
    for (const auto& part : peers_to_write()) {
      std::ranges::copy(part, before_.data() + received_.offset_of(part.data()));
    }
    const auto& header = *reinterpret_cast<const Header*>(own_memory_.data());
    std::memcpy(own_header_.data() + offsetof(Header, aborted_by), &header.aborted_by,
                sizeof header.aborted_by);
    require(std::memcmp(before_.data(), received_.at(0), pair_layout().bytes()) == 0 &&
                std::memcmp(own_header_.data(), own_memory_.data(), sizeof(Header)) == 0,
            "memory is written that is not the peer's to write");
  }

  void deliver(FrameType type, uint64_t stamp) {
    Frame frame;
    frame.type = type;
    frame.stamp = stamp;
    remote_->deliver(frame, {});
  }

  void take_frame() {
    Frame frame;
    frame.type = static_cast<FrameType>(1 + input_.below(4));
    frame.lane = static_cast<uint8_t>(input_.one_of({0, 1, kNoLane}));
    frame.half = static_cast<uint8_t>(input_.one_of({0, 1, 2}));
    const auto part = peers_to_write()[input_.below(7)];
    const uint64_t begin = received_.offset_of(part.data());
    frame.offset =
        input_.one_of({begin, begin + 16, begin + part.size(), pair_layout().bytes(), 0});
    frame.stamp = input_.one_of({0, 1, kRing, received_.mailbox(0).written + 1});
    frame.bytes = static_cast<uint32_t>(
        input_.one_of({0, 16, kLinePayload, part.size(), kRing, kFramePayload, UINT32_MAX}));
    if (frame.type == FrameType::kState) return take_words(frame);
    if (frame.type == FrameType::kStream) strange_ = true;  // the bytes after it are no message
    if (frame.bytes > 0) {
      try {
        std::byte* at = remote_->place(frame);
        require(at == received_.at(frame.offset), "another place");
        std::memset(at, 0x77, frame.bytes);
      } catch (const FlowError&) {
        return;
      }
    }
    remote_->deliver(frame, {});
    check_memory();
  }

  void take_words(Frame frame) {
    const auto bytes = input_.take_bytes(input_.one_of({88, 1112, 1113, 0}) % 2000);
    std::vector<std::byte> payload(bytes.size());
    std::ranges::copy(std::as_bytes(bytes), payload.data());
    frame.bytes = static_cast<uint32_t>(bytes.size());
    const PeerState before = transport_->state(kPeer, Board::kHost);
    remote_->deliver(frame, payload);
    const PeerState after = transport_->state(kPeer, Board::kHost);
    require(after.called >= before.called && after.finished >= before.finished, "it goes back");
    require(after.left >= before.left && after.failed >= before.failed, "it comes back");
    check_memory();
  }

  void look_at_peer() {
    const PeerState state = transport_->state(kPeer, Board::kHost);
    const auto current = transport_->descriptor(kPeer, Board::kHost, state.called);
    require(!current || !to_text(*current).empty(), "no text");
    require(transport_->failure(kPeer).size() < kFailureBytes, "a text without an end");
  }

  // ---- messages

  void take_message() {
    Words words;
    words.kind = static_cast<uint32_t>(1 + input_.below(6));
    words.tag = static_cast<uint32_t>(input_.below(3));
    words.dtype = input_.below(8) == 0 ? input_.take<uint32_t>() : 0;
    words.id = input_.one_of({0, 1, 2});
    words.bytes = input_.one_of({100, 10'000, 0, 9'900});
    words.body = static_cast<uint32_t>(
        input_.one_of({words.bytes, 0, 100, 9'900, 8 << 10, (8 << 10) + 1, 64 << 10}));
    if (words.kind == 2 || words.kind == 3 || words.kind == 5)
      words.body = input_.below(16) == 0 ? 1 : 0;
    send(&words, sizeof words);
    const std::vector<std::byte> body(std::min<size_t>(words.body, 16 << 10), std::byte{0x33});
    send(body.data(), body.size());
  }

  // Through the ring, as the peer's stream does.
  void send(const void* data, size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    for (size_t tries = 0; bytes > 0 && !strange_ && tries < 100; ++tries) {
      move();
      const MailboxCursors& cursors = received_.mailbox(0);
      const uint64_t at = cursors.written % kRing;
      const size_t taken = std::min({bytes, kRing - (cursors.written - cursors.read), kRing - at});
      Frame frame;
      frame.type = FrameType::kStream;
      frame.offset = received_.offset_of(received_.mailbox_data(0)) + at;
      frame.bytes = static_cast<uint32_t>(taken);
      frame.stamp = cursors.written + taken;
      if (taken > 0) std::memcpy(remote_->place(frame), from, taken);
      remote_->deliver(frame, {});
      from += taken;
      bytes -= taken;
    }
    if (bytes > 0) strange_ = true;  // it does not read any more
  }

  struct Posted {
    std::vector<std::byte> buffer;
    int completions = 0;
    std::weak_ptr<Message> message;
  };

  void post(bool sending) {
    const auto how = input_.take();
    if (posted_.size() == 50) return;
    constexpr std::array<size_t, 4> kSizes = {100, 10'000, 0, 70'000};
    auto posted = std::make_shared<Posted>();
    posted->buffer.assign(kSizes.at(how >> 2 & 3), sending ? kSentByte : std::byte{});
    auto message = std::make_shared<Message>(std::chrono::hours(1));
    message->sending = sending;
    message->peer = sending || (how & 16) != 0 ? kPeer : Message::kAnySource;
    message->tag = (how & 3) % 3;
    message->data = {posted->buffer.data(), posted->buffer.size()};
    message->on_done = [posted](const std::exception_ptr&) {
      ++posted->completions;
      std::ranges::fill(posted->buffer, std::byte{0xee});
      std::vector<std::byte>().swap(posted->buffer);  // its owner frees it
    };
    posted->message = message;
    posted_.push_back(std::move(posted));
    try {
      mailbox_->post(message);
    } catch (const PeerError&) {
      strange_ = true;
    }
  }

  void withdraw() {
    if (posted_.empty()) return;
    const auto posted = posted_[input_.below(posted_.size())];
    const MessagePtr message = posted->message.lock();
    if (!message) return;
    const auto late = std::make_exception_ptr(Failure("it is late"));
    const bool gone = mailbox_->withdraw(*message, late);
    require(gone == (posted->completions == 1), "neither withdrawn nor as it was");
    require(mailbox_->error() != late, "the group fails with it");
  }

  void move() {
    try {
      mailbox_->progress();
    } catch (const PeerError& error) {
      require(error.rank() == kPeer, "another peer is blamed");
      strange_ = true;
    }
  }

  Input& input_;
  DoorbellPage bell_{};
  Memory own_memory_, before_;
  std::vector<std::byte> own_header_;
  Segment received_;
  Outside outside_, nowhere_;
  Recorder recorder_;
  RemotePeer* remote_ = nullptr;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Mailbox> mailbox_;
  std::vector<std::shared_ptr<Posted>> posted_;
  bool strange_ = false;  // the peer's stream means nothing any more
};

}  // namespace

std::vector<std::string> rules() { return {"bounds"}; }

std::vector<Bytes> corpus() {
  std::vector<Bytes> scripts;
  // A long message: announced, asked for twice, read.
  constexpr uint8_t kMessage = 1, kSend = 3, kRead = 6, kClear = 2, kLong = 4;
  Output out;
  out.add_each(kSend, kLong, kMessage, kClear, 0, 1, 0, 0, 0, 1, kMessage, kClear, 0, 1, 0, 0, 0,
               1);
  scripts.push_back(out.add_each(kRead, kRead, kRead, kRead, kRead, kRead, kRead, kRead).take());
  for (uint64_t seed = 0; seed < 48; ++seed) {
    Random random(seed);
    for (uint64_t byte = 0; byte < 50 + 10 * seed; ++byte) out.add_each(random.below(8));
    scripts.push_back(out.take());
  }
  return scripts;
}

}  // namespace ringcomm::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  ringcomm::testing::Input input(data, bytes);
  ringcomm::testing::World(input).run();
  return 0;
}

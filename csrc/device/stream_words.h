// Words that a rank's streams write and wait for, in the ranks' areas and slots. They are put off
// until there is other work for the stream: a call of the driver costs as much for many words as
// for a single one.
#pragma once

#include <bit>

#include "device/peers.h"

namespace ringcomm::cuda {

class StreamWords {
 public:
  explicit StreamWords(const Peers& peers) : peers_(peers), api_(peers.api()) {}

  void flush(Stream stream) {
    if (!words_.empty()) api_.each_word(stream, words_);
    words_.clear();
  }
  void copy(Stream stream, const Spans& to, uint64_t at, const Spans& from, uint64_t first,
            uint64_t bytes) {
    copy_each(to, at, from, first, bytes, [&](std::byte* into, const std::byte* out, uint64_t n) {
      flush(stream);
      api_.copy(stream, into, out, n);
    });
  }
  void launch(Stream stream, const auto& args) {
    flush(stream);
    api_.launch(stream, args);
  }

  // Tells that all before it is done: Area::done(timeline) comes to `value`.
  void mark(Stream stream, int timeline, uint32_t value) {
    words_.push_back({own_word(peers_.own().done(timeline)), value});
    flush(stream);
  }
  // Tells in Area::replaying() that what comes in between belongs to a graph, and may wait.
  void watch(bool begins) {
    words_.push_back({own_word(peers_.own().replaying()), begins ? 1u : 0u});
  }
  void send_line(Rank to, int lane, uint64_t value) {
    const Area theirs = peers_.area(to);
    words_.push_back({peers_.word(to, &theirs.line(peers_.rank(), lane)), value});
  }
  void set_own_line(Rank from, int lane, uint64_t value) {
    words_.push_back({own_word(peers_.own().line(from, lane)), value});
  }
  void await_line(Rank from, int lane, uint64_t value) {
    words_.push_back({own_word(peers_.own().line(from, lane)), value, Word::kWait});
  }
  void fill_slot(LeaderSlot& slot, const LeaderSlot& value) {
    auto* const at = reinterpret_cast<std::byte*>(&slot);
    const auto fields = std::bit_cast<std::array<uint64_t, 4>>(value);
    for (size_t i = 0; i < fields.size(); ++i) {
      words_.push_back({at + i * sizeof(uint64_t), fields[i], Word::kWrite64});
    }
  }

 private:
  std::byte* own_word(const auto& word) const { return peers_.word(peers_.rank(), &word); }

  const Peers& peers_;
  Api& api_;
  std::vector<Word> words_;
};

}  // namespace ringcomm::cuda

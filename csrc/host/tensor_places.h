// Where the ranks' tensors lie, for collectives that read them there. Before a long one, the ranks
// of a host tell one another; if all of them can be read, a plan for readable shapes runs
// (plan/readable.cc), and else the usual one. All decide alike, because all have been told the
// same.
#pragma once

#include "report/operation.h"

namespace ringcomm {

class TensorPlaces {
 public:
  explicit TensorPlaces(const Transport& transport)
      : transport_(transport), all_(static_cast<size_t>(transport.size())) {}

  // Tells whether ranks ask: the same on all of them. `mapped`: they map one another's memory.
  static bool are_asked(const Operation& operation, const Shape& shape, Algorithm algorithm,
                        bool mapped);
  // Notes where this rank's tensors are, for the others. Spans are from mine() to all().
  void note(const Operation& operation);
  Span mine() { return {reinterpret_cast<std::byte*>(&mine_), sizeof mine_}; }
  Span all() { return {reinterpret_cast<std::byte*>(all_.data()), all_.size() * sizeof mine_}; }
  // Returns the shape of the all_gather that tells them.
  static Shape shape_of_telling(const Shape& shape);
  // Finds the tensors of all ranks, once they have told. Returns false if one can't be read.
  bool find(const Shape& shape, Theirs& theirs) const;

 private:
  struct Place {  // in the arena of its rank's process
    uint64_t input = 0, output = 0;
  };
  uint64_t offset_of(const std::vector<Span>& spans) const;
  std::byte* at(Rank rank, uint64_t offset, uint64_t bytes, uint64_t element) const;

  const Transport& transport_;
  Place mine_;
  std::vector<Place> all_;
};

}  // namespace ringcomm

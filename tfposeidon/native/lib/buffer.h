// Reuses memory, because page faults of a new buffer cost more time than the work on its data.

#ifndef TFPOSEIDON_NATIVE_LIB_BUFFER_H_
#define TFPOSEIDON_NATIVE_LIB_BUFFER_H_

#include <cstdint>
#include <memory>

namespace tfposeidon {

template <class T>
class Buffer {
 public:
  // Returns memory for at least `size` elements; earlier contents may be lost.
  T* reserve(int64_t size) {
    if (size > size_) {
      // Free the old memory first, because there may not be enough memory for both buffers.
      data_.reset();
      data_.reset(new T[size]);
      size_ = size;
    }
    return data_.get();
  }

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
  int64_t size_ = 0;
};

}  // namespace tfposeidon

#endif  // TFPOSEIDON_NATIVE_LIB_BUFFER_H_

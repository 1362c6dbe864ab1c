// Memory that is reused: a fresh buffer costs more in page faults than the work done in it.

#ifndef TFPOSEIDON_NATIVE_LIB_BUFFER_H_
#define TFPOSEIDON_NATIVE_LIB_BUFFER_H_

#include <cstdint>
#include <memory>

namespace tfposeidon {

template <class T>
class Buffer {
 public:
  // At least `size` elements; what was in it may be gone.
  T* reserve(int64_t size) {
    if (size > size_) {
      data_.reset();  // Before the new one is there: both at once might be too much.
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

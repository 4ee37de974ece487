#include "ends.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>

namespace moesaic {
namespace {

[[noreturn]] void fail() {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

constexpr uint64_t kMaxSize = uint64_t{1} << 39;

}  // namespace

Mapping::Mapping(int descriptor) {
    // Without the seal the owner could shrink it, and reading beyond its end would kill this process. Only
    // tmpfs has seals and, unlike hugetlbfs, never runs out of reserved pages.
    int seals = fcntl(descriptor, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        throw nb::value_error("the memory is not sealed against shrinking");
    }
    struct statfs system;
    struct stat file;
    if (fstatfs(descriptor, &system) != 0 || fstat(descriptor, &file) != 0) fail();
    if (system.f_type != TMPFS_MAGIC) throw nb::value_error("the memory is not a memfd");
    size_ = static_cast<uint64_t>(file.st_size);
    if (size_ <= kHeap || size_ > kMaxSize) throw nb::value_error("the segment is too small or too large");
    void* address = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (address == MAP_FAILED) fail();
    base_ = static_cast<unsigned char*>(address);
}

Mapping::~Mapping() {
    munmap(base_, size_);
}

End::End(nb::object mapping, int descriptor)
    : segment_(nb::cast<Mapping&>(mapping).segment()), descriptor_(descriptor) {
    writable_ = nb::steal(PyMemoryView_FromObject(mapping.ptr()));
    if (!writable_.is_valid()) throw nb::python_error();
    read_only_ = writable_.attr("toreadonly")();
}

void End::close() {
    segment_ = {nullptr, 0};
    descriptor_ = -1;
    writable_.reset();
    read_only_.reset();
}

nb::object End::view(uint64_t offset, uint64_t bytes, bool writable) const {
    return (writable ? writable_ : read_only_)[nb::slice(nb::int_(offset), nb::int_(offset + bytes), nb::none())];
}

void End::ring() const {
    // A full socket wakes the peer anyway. A closed one is noticed when it is read.
    while (send(descriptor_, "!", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno == EINTR) {
    }
}

}  // namespace moesaic

// The Python module: the two ends of a shared segment (shm.py connects them and watches the socket),
// and the ends of a group of peers (shared_peers.py).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include "client.h"
#include "peers.h"
#include "server.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    moesaic::Segment segment = nb::inst_ptr<moesaic::Mapping>(self)->segment();
    return PyBuffer_FillInfo(view, self, segment.base, static_cast<Py_ssize_t>(segment.size), 0, flags);
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

}  // namespace

NB_MODULE(_shm, m) {
    using namespace moesaic;
    nb::set_leak_warnings(false);  // a call may still exist when the interpreter ends
    m.doc() = "calls through shared memory; csrc/segment.h describes its layout";
    m.attr("CALLS") = kCalls;
    m.attr("MAX_ROWS") = kMaxRows;
    m.attr("HEAP") = kHeap;
    nb::exception<Broken>(m, "Broken");
    nb::class_<Mapping>(m, "Mapping", nb::type_slots(buffer_slots)).def(nb::init<int>(), "descriptor"_a);
    nb::class_<Call>(m, "Call")
        .def_ro("number", &Call::number)
        .def_ro("rows", &Call::rows)
        .def_ro("row_bytes", &Call::row_bytes)
        .def_ro("request", &Call::request)
        .def_ro("answer", &Call::answer);
    nb::class_<Incoming>(m, "Incoming")
        .def_ro("number", &Incoming::number)
        .def_ro("rows", &Incoming::rows)
        .def_ro("row_bytes", &Incoming::row_bytes)
        .def_ro("request", &Incoming::request)
        .def_ro("answer", &Incoming::answer)
        .def("publish", &Incoming::publish, "indices"_a);
    nb::class_<Client>(m, "Client")
        .def(nb::init<nb::object, int>(), "mapping"_a, "descriptor"_a)
        .def_prop_ro("capacity", &Client::capacity)
        .def("open", &Client::open, "request_bytes"_a, "rows"_a, "row_bytes"_a)
        .def("post", &Client::post, "call"_a)
        .def("poll", &Client::poll)
        .def("release", &Client::release, "call"_a)
        .def("ready", &Client::ready)
        .def("arm", &Client::arm)
        .def("disarm", &Client::disarm)
        .def("close", &Client::close);
    nb::class_<Server>(m, "Server")
        .def(nb::init<nb::object, int>(), "mapping"_a, "descriptor"_a)
        .def("poll", [](nb::handle self) { return nb::cast<Server&>(self).poll(self); })
        .def("ready", &Server::ready)
        .def("arm", &Server::arm)
        .def("disarm", &Server::disarm)
        .def("close", &Server::close);
    m.attr("PEERS") = kPeers;
    nb::class_<Peers>(m, "Peers")
        .def(nb::init<nb::object, uint64_t, uint64_t>(), "mapping"_a, "rank"_a, "size"_a)
        .def_prop_ro("capacity", &Peers::capacity)
        .def("open", &Peers::open, "sizes"_a)
        .def("open_for_all", &Peers::open_for_all, "count"_a)
        .def("post", &Peers::post)
        .def("wait", &Peers::wait, "seconds"_a)
        .def("arm", &Peers::arm)
        .def("disarm", &Peers::disarm)
        .def("missing", &Peers::missing)
        .def("take", &Peers::take)
        .def("close", &Peers::close);
}

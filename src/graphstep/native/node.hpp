// Nodes of autograd. Replay: what it sees of a run. Landmarks: the way from there to the parameters whose gradients the
// backward halves accumulate by themselves.

#pragma once

#include "relay.hpp"

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

namespace {

namespace autograd = torch::autograd;
using NodePointer = decltype(autograd::Edge::function);

// Nodes are counted by themselves in newer versions of torch, and by shared pointers in older ones.
template <class Made, class Pointer = NodePointer>
Pointer make_node(Made** made) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<autograd::Node>>) {
    *made = new Made();
    return Pointer(static_cast<autograd::Node*>(*made), [](auto* node) { deleteNode(node); });
  } else {
    auto found = c10::make_intrusive<Made>();
    *made = found.get();
    return Pointer(std::move(found));
  }
}

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

[[noreturn]] void throw_python_error() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// True if the backward pass under way accumulates into all leaves: no gradients of chosen tensors were asked for.
bool accumulates_all() {
  const auto* chosen = autograd::get_current_graph_task_exec_info();
  return chosen == nullptr || chosen->empty();
}

// Stands between a run and its landmarks, so that a backward pass towards parameters alone comes by the run. A pass
// that goes everywhere need not visit them, which would cost more than all else: nothing comes from here. Only those
// that others refer to as well may wait for their part of this one.
struct Landmarks : autograd::Node {
  autograd::edge_list passed;

  autograd::variable_list apply(autograd::variable_list&&) override {
    // Only then does the engine call release_variables after this.
    if (accumulates_all() && !autograd::get_current_graph_task_keep_graph()) {
      autograd::edge_list& edges = next_edges();
      auto rest = std::partition(edges.begin(), edges.end(), [](const autograd::Edge& edge) {
        return edge.function.use_count() > 1;
      });
      // The engine knows them by address until the pass is over.
      passed.insert(passed.end(), std::make_move_iterator(rest), std::make_move_iterator(edges.end()));
      edges.erase(rest, edges.end());
    }
    return autograd::variable_list(num_outputs());
  }

  // The engine goes on along as many edges as apply has returned, the first ones. A later pass has to come by here too,
  // to be refused.
  void release_variables() override {
    autograd::edge_list& edges = next_edges();
    edges.insert(edges.end(), std::make_move_iterator(passed.begin()), std::make_move_iterator(passed.end()));
    passed.clear();
  }

  std::string name() const override { return "Landmarks"; }
};

struct Replay : autograd::Node {
  PyObject* run = nullptr;
  Relay* relay = nullptr;

  ~Replay() override {
    if (run == nullptr || !Py_IsInitialized()) return;
    Gil gil;
    Py_CLEAR(run);
    Py_CLEAR(relay);
  }

  std::string name() const override { return "Replay"; }

  // The last edge goes to the landmarks.
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    Gil gil;
    bool accumulates = accumulates_all();
    if (accumulates && is_plain(gradients)) {
      autograd::variable_list found;
      if (!launch_all(gradients, found)) throw_python_error();
      return found;
    }
    return look_closer(gradients, accumulates);
  }

 private:
  bool is_plain(const autograd::variable_list& gradients) const {
    const StepList& value = relay->value;
    return value.has_plain_backward && !at::GradMode::is_enabled() && attribute_is(run, HAS_RUN, Py_False) &&
        attribute_is(value.session, IS_CLOSED, Py_False) && reads_hold() && steps_hold(gradients);
  }

  // Results of other runs that the first step reads: a list of (tensor, version, whether its backward half reads it).
  bool reads_hold() const {
    PyObject* reads = PyObject_GetAttr(run, names[READ]);
    bool is_well = reads != nullptr && PyList_Check(reads);
    for (Py_ssize_t i = 0; is_well && i < PyList_GET_SIZE(reads); ++i) {
      PyObject* read = PyList_GET_ITEM(reads, i);
      is_well = PyTuple_Check(read) && PyTuple_GET_SIZE(read) == 3 && THPVariable_Check(PyTuple_GET_ITEM(read, 0)) &&
          PyLong_AsLongLong(PyTuple_GET_ITEM(read, 1)) == version_of(PyTuple_GET_ITEM(read, 0));
    }
    Py_XDECREF(reads);
    PyErr_Clear();
    return is_well;
  }

  bool steps_hold(const autograd::variable_list& gradients) const {
    PyObject* versions = PyObject_GetAttr(run, names[VERSIONS]);
    bool is_well = versions != nullptr && PyList_Check(versions) &&
        backward_holds(relay->value, versions, gradients.size(), [&](size_t at) { return gradients[at].defined(); });
    Py_XDECREF(versions);
    PyErr_Clear();
    return is_well;
  }

  bool launch_all(const autograd::variable_list& gradients, autograd::variable_list& found) {
    const StepList& value = relay->value;
    PyObject* nothing = attribute_is(value.session, AHEAD, Py_None)
        ? Py_NewRef(Py_None)
        : PyObject_CallMethodNoArgs(value.session, names[SETTLE_AHEAD]);
    if (nothing == nullptr) return false;
    Py_DECREF(nothing);
    PyObject* before = PyObject_GetAttr(run, names[BEFORE_BACKWARD]);
    if (before == nullptr) return false;
    nothing = before == Py_None ? Py_NewRef(before) : PyObject_CallOneArg(before, value.steps.back().pair);
    Py_DECREF(before);
    if (nothing == nullptr) return false;
    Py_DECREF(nothing);
    if (!homes_hold(value)) {
      PyObject* given = wrapped(gradients);
      PyObject* results = given == nullptr ? nullptr : PyObject_CallMethodOneArg(run, names[LAUNCH_ALL], given);
      Py_XDECREF(given);
      return unwrapped(results, found);
    }
    if (PyObject_SetAttr(run, names[HAS_RUN], Py_True) != 0) return false;
    size_t start = gradients.size() - value.grad_outputs.size();
    for (size_t i = 0; i < value.grad_outputs.size(); ++i) {
      if (value.grad_outputs[i] == Py_None) continue;
      const at::Tensor& place = THPVariable_Unpack(value.grad_outputs[i]);
      const at::Tensor& given = gradients[start + i];
      if (place.const_data_ptr() != given.const_data_ptr() || place.strides() != given.strides()) place.copy_(given);
    }
    if (!launch_backwards(value)) return false;
    // Whoever receives a gradient may keep it, and the static one is overwritten by the next backward half.
    for (PyObject* each : value.incoming)
      found.push_back(each == Py_None ? at::Tensor() : THPVariable_Unpack(each).clone());
    found.resize(num_outputs());
    nothing = PyObject_CallMethodNoArgs(run, names[CLOSE]);
    Py_XDECREF(nothing);
    return nothing != nullptr;
  }

  autograd::variable_list look_closer(const autograd::variable_list& gradients, bool accumulates) {
    PyObject* given = wrapped(gradients);
    PyObject* results = given == nullptr
        ? nullptr
        : PyObject_CallMethodObjArgs(run, names[REPLAYED_BACKWARD], given, accumulates ? Py_True : Py_False, nullptr);
    Py_XDECREF(given);
    autograd::variable_list found;
    if (!unwrapped(results, found)) throw_python_error();
    return found;
  }

  static PyObject* wrapped(const autograd::variable_list& gradients) {
    PyObject* made = PyTuple_New(static_cast<Py_ssize_t>(gradients.size()));
    for (size_t i = 0; made != nullptr && i < gradients.size(); ++i) {
      PyObject* each = gradients[i].defined() ? THPVariable_Wrap(gradients[i]) : Py_NewRef(Py_None);
      if (each == nullptr) {
        Py_CLEAR(made);
      } else {
        PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), each);
      }
    }
    return made;
  }

  // Takes the reference to a list of gradients for all edges but the last.
  bool unwrapped(PyObject* results, autograd::variable_list& found) const {
    if (results == nullptr) return false;
    bool is_well = PyList_Check(results) && PyList_GET_SIZE(results) + 1 == static_cast<Py_ssize_t>(num_outputs());
    if (!is_well) PyErr_SetString(PyExc_TypeError, "a list with a gradient for each input is expected");
    for (Py_ssize_t i = 0; is_well && i < PyList_GET_SIZE(results); ++i) {
      PyObject* each = PyList_GET_ITEM(results, i);
      is_well = each == Py_None || is_tensor(each);
      if (is_well) found.push_back(each == Py_None ? at::Tensor() : THPVariable_Unpack(each));
    }
    Py_DECREF(results);
    found.resize(num_outputs());
    return is_well;
  }
};

bool add_edges(autograd::Node* node, PyObject* leaves) {
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(leaves); ++i) {
    PyObject* leaf = PySequence_Fast_GET_ITEM(leaves, i);
    if (!is_tensor(leaf)) return false;
    node->add_next_edge(autograd::impl::gradient_edge(THPVariable_Unpack(leaf)));
  }
  return true;
}

// replay(run, stop, tensors, leaves, landmarks, skipped): run the first step forward, without a history, by
// run.forward(stop, tensors); its results, with the run as their history. Gradients go to the leaves; those of the
// results at the positions `skipped` are of no use.
PyObject* relay_replay(PyObject* object, PyObject* arguments) {
  PyObject *run, *stop, *tensors, *leaves, *landmarks, *skipped;
  if (!PyArg_ParseTuple(
          arguments, "OOOO!O!O!", &run, &stop, &tensors, &PyTuple_Type, &leaves, &PyList_Type, &landmarks, &PyList_Type,
          &skipped))
    return nullptr;
  Replay* node;
  NodePointer owner = make_node<Replay>(&node);
  node->run = Py_NewRef(run);
  node->relay = reinterpret_cast<Relay*>(Py_NewRef(object));
  Landmarks* between;
  NodePointer owner_between = make_node<Landmarks>(&between);
  if (!add_edges(node, leaves) || !add_edges(between, landmarks)) return nullptr;
  node->add_next_edge(autograd::Edge(std::move(owner_between), 0));
  PyObject* results;
  {
    at::AutoGradMode without_history(false);
    results = PyObject_CallMethodObjArgs(run, names[FORWARD], stop, tensors, nullptr);
  }
  if (results == nullptr) return nullptr;
  if (!PyTuple_Check(results)) {
    PyErr_SetString(PyExc_TypeError, "a tuple of tensors is expected");
    Py_DECREF(results);
    return nullptr;
  }
  // Gradients are made on the stream of this call. The engine has whoever calls backward wait for the streams of the last
  // nodes, and the landmarks may be the only one.
  if (PyTuple_GET_SIZE(results) > 0) between->add_input_metadata(THPVariable_Unpack(PyTuple_GET_ITEM(results, 0)));
  Py_ssize_t at = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results); ++i) {
    bool is_skipped = at < PyList_GET_SIZE(skipped) && PyLong_AsSsize_t(PyList_GET_ITEM(skipped, at)) == i;
    if (is_skipped) {
      node->add_input_metadata(autograd::Node::undefined_input());
      ++at;
      continue;
    }
    const at::Tensor& result = THPVariable_Unpack(PyTuple_GET_ITEM(results, i));
    autograd::impl::set_gradient_edge(result, autograd::Edge(owner, node->add_input_metadata(result)));
  }
  return results;
}

}  // namespace

// Relay: the steps of a chain of captured layers, and what their backward halves need.

#pragma once

#include "facts.hpp"

namespace {

// ----- Relay

struct Step {
  FactList* facts = nullptr;
  PyObject* calls = nullptr;    // where the layer is called: has `current` and `manual_hook`
  PyObject* call = nullptr;     // a Call
  PyObject* pair = nullptr;
  PyObject* owner = nullptr;    // of the pair: what `calls.current` has to be
  PyObject* stats = nullptr;
  PyObject* launch = nullptr;   // None: launched with the step before
  PyObject* relaunch = nullptr; // of the backward half; None: launched with the step after
  PyObject* forward_position = nullptr;
  PyObject* backward_position = nullptr;
  bool is_tuple = false;        // the result: one tensor, or a tuple of them
  bool notes_launch = false;
  bool is_kept = false;         // launched with the step before, and what it writes can be put back
  std::vector<PyObject*> outputs, reads, trained, accumulated;
  std::vector<bool> has_gradient;  // for each output, whether the backward half takes one
};
struct Home {
  PyObject* home;  // has `shown`, which may change
  PyObject* leaf;
  const void* address;
  bool is_main;
};
struct Handed {
  PyObject* place;  // position or name of an argument
  Py_ssize_t position;  // -1 for a name
  Py_ssize_t output;
};
struct StepList {
  PyObject* lane = nullptr;
  PyObject* session = nullptr;
  bool has_plain_backward = false;  // its backward halves are launched one after the other, where all are wanted
  bool keeps_state = false;         // what a step writes that was launched with one before can be put back
  std::vector<PyObject*> grad_outputs;  // of the last step; tensors or None
  std::vector<PyObject*> incoming;      // gradients that autograd is given: of the inputs, then of parameters; or None
  std::vector<Step> steps;
  std::vector<Handed> handed;
  std::vector<Home> homes;
};
using Relay = Boxed<StepList>;

struct Expected {
  PyObject* place;
  Py_ssize_t position;
  PyObject* tensor;  // alive as long as its weak reference has not been called back
  int64_t version;
};
struct Other {
  PyObject* name;  // nullptr: by position
  Py_ssize_t position;
  PyObject* value;
  int64_t version;  // -2: no tensor
};
struct Way {
  Relay* relay = nullptr;
  PyObject* run = nullptr;
  PyObject* span = nullptr;
  PyObject* versions = nullptr;  // run._versions
  PyObject* handles = nullptr;
  PyObject* arguments = nullptr;
  PyObject* named = nullptr;
  PyObject* ambient = nullptr;
  PyObject* watchers = nullptr;  // weak references to what was handed out last
  size_t first = 0, next = 0;
  bool is_running = false;  // Python may run meanwhile, and end the passage
  bool is_doomed = false;   // it did: the end comes when the step is over
  Py_ssize_t num_positional = 0, num_named = 0;
  std::vector<Expected> expected;
  std::vector<Other> others;
  std::vector<std::vector<int64_t>> read_versions;  // of each step that was launched with one before
};
using Passage = Boxed<Way>;

struct CallValue {
  PyObject* fallback = nullptr;
  PyObject* calls = nullptr;
  PyObject* resume = nullptr;  // called with the state of a passage that Python has to look at
  Passage* passage = nullptr;  // kept by its own reference
  bool takes_first = false;    // gives the one tensor of a tuple
};
struct Call {
  PyObject_HEAD
  PyObject* kept;
  CallValue value;
  vectorcallfunc vectorcall;
};

bool tensors_into(std::vector<PyObject*>& found, PyObject* list) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(list); ++i) {
    if (!is_tensor(PyTuple_GET_ITEM(list, i))) return false;
    found.push_back(PyTuple_GET_ITEM(list, i));
  }
  return true;
}

// step(facts, calls, call, pair, stats, launch, relaunch, (forward position, backward position), is_tuple, notes_launch,
//      is_kept, outputs, reads, trained, accumulated, has_gradient)
PyObject* relay_step(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Relay*>(object);
  Step step;
  PyObject *facts, *positions, *outputs, *reads, *trained, *accumulated, *has_gradient;
  int is_tuple, notes_launch, is_kept;
  if (!PyArg_ParseTuple(
          arguments, "O!OO!OOOOO!pppO!O!O!O!O!", facts_type, &facts, &step.calls, call_type, &step.call, &step.pair,
          &step.stats, &step.launch, &step.relaunch, &PyTuple_Type, &positions, &is_tuple, &notes_launch, &is_kept,
          &PyTuple_Type, &outputs, &PyTuple_Type, &reads, &PyTuple_Type, &trained, &PyTuple_Type, &accumulated, &PyTuple_Type,
          &has_gradient))
    return nullptr;
  if (!PyArg_ParseTuple(positions, "OO", &step.forward_position, &step.backward_position)) return nullptr;
  step.facts = &reinterpret_cast<Facts*>(facts)->value;
  step.is_tuple = is_tuple != 0;
  step.notes_launch = notes_launch != 0;
  step.is_kept = is_kept != 0;
  self->value.keeps_state = self->value.keeps_state || step.is_kept;
  if (!tensors_into(step.outputs, outputs) || !tensors_into(step.reads, reads) ||
      !tensors_into(step.trained, trained) || !tensors_into(step.accumulated, accumulated))
    return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(has_gradient); ++i)
    step.has_gradient.push_back(PyTuple_GET_ITEM(has_gradient, i) == Py_True);
  if (step.has_gradient.size() != step.outputs.size()) {
    PyErr_SetString(PyExc_ValueError, "has_gradient has one entry for each output");
    return nullptr;
  }
  step.owner = PyObject_GetAttr(step.pair, names[OWNER]);
  if (step.owner == nullptr) return nullptr;
  bool is_held = is_open(self->kept) && keep(self->kept, arguments) && keep(self->kept, step.owner);
  Py_DECREF(step.owner);
  if (!is_held) return nullptr;
  self->value.steps.push_back(std::move(step));
  Py_RETURN_NONE;
}

// home(home, leaf, address, is_main)
PyObject* relay_home(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Relay*>(object);
  PyObject *home, *leaf;
  Py_ssize_t address;
  int is_main;
  if (!PyArg_ParseTuple(arguments, "OOnp", &home, &leaf, &address, &is_main)) return nullptr;
  if (!is_tensor(leaf) || !is_open(self->kept) || !keep(self->kept, arguments)) return nullptr;
  self->value.homes.push_back({home, leaf, reinterpret_cast<const void*>(address), is_main != 0});
  Py_RETURN_NONE;
}

// handover(place, output)
PyObject* relay_handover(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Relay*>(object);
  PyObject* place;
  Py_ssize_t output;
  if (!PyArg_ParseTuple(arguments, "On", &place, &output)) return nullptr;
  if (!is_open(self->kept) || !keep(self->kept, arguments)) return nullptr;
  Py_ssize_t position = PyLong_Check(place) ? PyLong_AsSsize_t(place) : -1;
  self->value.handed.push_back({place, position, output});
  Py_RETURN_NONE;
}

int relay_init(PyObject* object, PyObject* arguments, PyObject*) {
  auto* self = reinterpret_cast<Relay*>(object);
  PyObject* lane;
  if (!PyArg_ParseTuple(arguments, "O", &lane)) return -1;
  if (!is_open(self->kept) || !keep(self->kept, arguments)) return -1;
  self->value.lane = lane;
  return 0;
}

bool home_holds(const Home& home) {
  PyObject* shown = PyObject_GetAttr(home.home, names[SHOWN]);
  if (shown == nullptr || !THPVariable_Check(shown)) {
    Py_XDECREF(shown);
    PyErr_Clear();
    return false;
  }
  Py_DECREF(shown);  // The home keeps it.
  if (address_of(shown) != home.address) return false;
  if (home.is_main) return attribute_is(home.leaf, MAIN_GRAD, shown);
  PyObject* attributes = PyObject_GenericGetDict(home.leaf, nullptr);
  if (attributes == nullptr) {
    PyErr_Clear();
    return false;
  }
  int has_main = PyDict_Contains(attributes, names[MAIN_GRAD]);
  Py_DECREF(attributes);
  if (has_main != 0) {
    PyErr_Clear();
    return false;
  }
  return THPVariable_Unpack(home.leaf).grad().unsafeGetTensorImpl() == impl_of(shown);
}

// True if surely all backward halves may be launched, one after the other, for gradients of the last step's results
// alone. `is_given` tells which of the results of all steps have one.
template <class IsGiven>
bool backward_holds(const StepList& value, PyObject* versions, size_t num_gradients, IsGiven is_given) {
  if (PyList_GET_SIZE(versions) != static_cast<Py_ssize_t>(value.steps.size())) return false;
  size_t at = 0;
  for (size_t i = 0; i < value.steps.size(); ++i) {
    const Step& step = value.steps[i];
    PyObject* noted = PyList_GET_ITEM(versions, static_cast<Py_ssize_t>(i));
    bool is_last = i + 1 == value.steps.size();
    if (!PyList_Check(noted) || PyList_GET_SIZE(noted) != static_cast<Py_ssize_t>(step.outputs.size())) return false;
    for (size_t k = 0; k < step.outputs.size(); ++k, ++at) {
      if (at >= num_gradients || is_given(at) != (is_last && step.has_gradient[k])) return false;
      if (PyLong_AsLongLong(PyList_GET_ITEM(noted, static_cast<Py_ssize_t>(k))) != version_of(step.outputs[k]))
        return false;
    }
    for (PyObject* each : step.trained)
      if (!THPVariable_Unpack(each).requires_grad()) return false;
    for (PyObject* each : step.accumulated)
      if (has_hooks(each) || has_post_hooks(each)) return false;
  }
  return at == num_gradients;
}

bool homes_hold(const StepList& value) { return std::all_of(value.homes.begin(), value.homes.end(), home_holds); }

// landmarks(first): of each step from there on, a parameter whose gradient its backward half accumulates, without hooks
// that autograd would run.
PyObject* relay_landmarks(PyObject* object, PyObject* first) {
  auto& value = reinterpret_cast<Relay*>(object)->value;
  Py_ssize_t start = PyLong_AsSsize_t(first);
  if (start == -1 && PyErr_Occurred()) return nullptr;
  PyObject* found = PyList_New(0);
  for (size_t i = static_cast<size_t>(start); found != nullptr && i < value.steps.size(); ++i) {
    const auto& accumulated = value.steps[i].accumulated;
    if (!accumulated.empty() && !has_post_hooks(accumulated[0]) && PyList_Append(found, accumulated[0]) != 0)
      Py_CLEAR(found);
  }
  return found;
}

// results(first): tensors over the outputs of each step from there on, without a history.
PyObject* relay_results(PyObject* object, PyObject* first) {
  auto& value = reinterpret_cast<Relay*>(object)->value;
  Py_ssize_t start = PyLong_AsSsize_t(first);
  if (start == -1 && PyErr_Occurred()) return nullptr;
  size_t size = 0;
  for (size_t i = static_cast<size_t>(start); i < value.steps.size(); ++i) size += value.steps[i].outputs.size();
  PyObject* found = PyTuple_New(static_cast<Py_ssize_t>(size));
  Py_ssize_t at = 0;
  try {
    for (size_t i = static_cast<size_t>(start); found != nullptr && i < value.steps.size(); ++i) {
      for (PyObject* output : value.steps[i].outputs) {
        PyObject* made = THPVariable_Wrap(THPVariable_Unpack(output).detach());
        if (made == nullptr) {
          Py_CLEAR(found);
          break;
        }
        PyTuple_SET_ITEM(found, at++, made);
      }
    }
  } catch (const std::exception& error) {
    Py_CLEAR(found);
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return found;
}

bool launch(PyObject* function, PyObject* stats) {
  PyObject* nothing = PyObject_CallNoArgs(function);
  if (nothing == nullptr) return false;
  Py_DECREF(nothing);
  return count_up(stats, NUM_LAUNCHES);
}

bool launch_backwards(const StepList& value) {
  for (size_t i = value.steps.size(); i-- > 0;) {
    const Step& step = value.steps[i];
    if (step.relaunch != Py_None && !launch(step.relaunch, step.stats)) return false;
  }
  return true;
}

// launch_backward(): launch all backward halves, last first.
PyObject* relay_launch_backward(PyObject* object, PyObject*) {
  if (!launch_backwards(reinterpret_cast<Relay*>(object)->value)) return nullptr;
  Py_RETURN_NONE;
}

// backward(session, grad outputs of the last step, gradients for autograd): all backward halves may be launched one
// after the other, where all of them are wanted.
PyObject* relay_backward(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Relay*>(object);
  PyObject *session, *grad_outputs, *incoming;
  if (!PyArg_ParseTuple(arguments, "OO!O!", &session, &PyTuple_Type, &grad_outputs, &PyTuple_Type, &incoming))
    return nullptr;
  if (!is_open(self->kept) || !keep(self->kept, arguments)) return nullptr;
  for (auto [found, list] : {std::pair(&self->value.grad_outputs, grad_outputs), {&self->value.incoming, incoming}}) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(list); ++i) {
      PyObject* each = PyTuple_GET_ITEM(list, i);
      if (each != Py_None && !is_tensor(each)) return nullptr;
      found->push_back(each);
    }
  }
  self->value.session = session;
  self->value.has_plain_backward = true;
  Py_RETURN_NONE;
}

}  // namespace

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
//      outputs, reads, trained, accumulated, has_gradient)
PyObject* relay_step(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Relay*>(object);
  Step step;
  PyObject *facts, *positions, *outputs, *reads, *trained, *accumulated, *has_gradient;
  int is_tuple, notes_launch;
  if (!PyArg_ParseTuple(
          arguments, "O!OO!OOOOO!ppO!O!O!O!O!", facts_type, &facts, &step.calls, call_type, &step.call, &step.pair,
          &step.stats, &step.launch, &step.relaunch, &PyTuple_Type, &positions, &is_tuple, &notes_launch, &PyTuple_Type,
          &outputs, &PyTuple_Type, &reads, &PyTuple_Type, &trained, &PyTuple_Type, &accumulated, &PyTuple_Type,
          &has_gradient))
    return nullptr;
  if (!PyArg_ParseTuple(positions, "OO", &step.forward_position, &step.backward_position)) return nullptr;
  step.facts = &reinterpret_cast<Facts*>(facts)->value;
  step.is_tuple = is_tuple != 0;
  step.notes_launch = notes_launch != 0;
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
  bool is_kept = is_open(self->kept) && keep(self->kept, arguments) && keep(self->kept, step.owner);
  Py_DECREF(step.owner);
  if (!is_kept) return nullptr;
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

// holds_backward(versions, gradients): True if surely all backward halves may be launched, one after the other, for
// gradients of the last step's results alone.
PyObject* relay_holds_backward(PyObject* object, PyObject* arguments) {
  auto& value = reinterpret_cast<Relay*>(object)->value;
  PyObject *versions, *gradients;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &versions, &PyTuple_Type, &gradients)) return nullptr;
  if (PyList_GET_SIZE(versions) != static_cast<Py_ssize_t>(value.steps.size())) Py_RETURN_FALSE;
  Py_ssize_t at = 0;
  for (size_t i = 0; i < value.steps.size(); ++i) {
    const Step& step = value.steps[i];
    PyObject* noted = PyList_GET_ITEM(versions, static_cast<Py_ssize_t>(i));
    bool is_last = i + 1 == value.steps.size();
    if (!PyList_Check(noted) || PyList_GET_SIZE(noted) != static_cast<Py_ssize_t>(step.outputs.size())) Py_RETURN_FALSE;
    for (size_t k = 0; k < step.outputs.size(); ++k, ++at) {
      if (at >= PyTuple_GET_SIZE(gradients)) Py_RETURN_FALSE;
      bool is_given = PyTuple_GET_ITEM(gradients, at) != Py_None;
      if (is_given != (is_last && step.has_gradient[k])) Py_RETURN_FALSE;
      if (PyLong_AsLongLong(PyList_GET_ITEM(noted, static_cast<Py_ssize_t>(k))) != version_of(step.outputs[k]))
        Py_RETURN_FALSE;
    }
    for (PyObject* each : step.trained)
      if (!THPVariable_Unpack(each).requires_grad()) Py_RETURN_FALSE;
    for (PyObject* each : step.accumulated)
      if (has_hooks(each) || has_post_hooks(each)) Py_RETURN_FALSE;
  }
  if (at != PyTuple_GET_SIZE(gradients)) Py_RETURN_FALSE;
  Py_RETURN_TRUE;
}

// holds_homes(): True if surely all gradients are where the backward halves write them.
PyObject* relay_holds_homes(PyObject* object, PyObject*) {
  for (const Home& home : reinterpret_cast<Relay*>(object)->value.homes)
    if (!home_holds(home)) Py_RETURN_FALSE;
  Py_RETURN_TRUE;
}

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

PyObject* relay_launch_backward(PyObject* object, PyObject*) {
  auto& value = reinterpret_cast<Relay*>(object)->value;
  for (size_t i = value.steps.size(); i-- > 0;) {
    const Step& step = value.steps[i];
    if (step.relaunch != Py_None && !launch(step.relaunch, step.stats)) return nullptr;
  }
  Py_RETURN_NONE;
}

}  // namespace

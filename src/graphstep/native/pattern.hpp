// Pattern: what the arguments of a call look like, as a tree.

#pragma once

#include "facts.hpp"

#include <cstring>
#include <string_view>

#include <torch/csrc/Device.h>

namespace {

enum class Kind { TENSOR, TUPLE, LIST, DICT, VALUE };

struct Shape {
  Kind kind = Kind::VALUE;
  std::vector<Shape> children;
  PyObject* names = nullptr;  // of a dict's entries, in order
  PyObject* value = nullptr;
  // Of a tensor.
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::ScalarType::Undefined;
  at::Device device = at::kCPU;
  bool requires_grad = false, is_conj = false, is_neg = false;
};

struct PatternValue {
  Shape arguments, named;
};
using Pattern = Boxed<PatternValue>;
PyTypeObject* pattern_type;

bool integers_into(std::vector<int64_t>& found, PyObject* tuple) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
  return !PyErr_Occurred();
}

// ("tensor", sizes, strides, dtype, device, requires_grad, is_conj, is_neg), ("tuple", children), ("list", children),
// ("dict", children, names) or ("value", value)
bool read_shape(Shape& shape, PyObject* tree) {
  PyObject* kind = PyTuple_Check(tree) && PyTuple_GET_SIZE(tree) > 1 ? PyTuple_GET_ITEM(tree, 0) : nullptr;
  const char* text = kind == nullptr || !PyUnicode_Check(kind) ? nullptr : PyUnicode_AsUTF8(kind);
  std::string_view word = text == nullptr ? "" : text;
  if (word == "tensor") {
    shape.kind = Kind::TENSOR;
    const char* name;
    PyObject *sizes, *strides, *dtype, *device;
    int requires_grad, is_conj, is_neg;
    if (!PyArg_ParseTuple(
            tree, "sO!O!OOppp", &name, &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &dtype, &device, &requires_grad,
            &is_conj, &is_neg))
      return false;
    if (!THPDtype_Check(dtype) || !THPDevice_Check(device)) {
      PyErr_SetString(PyExc_TypeError, "a dtype and a device are expected");
      return false;
    }
    shape.dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
    shape.device = reinterpret_cast<THPDevice*>(device)->device;
    shape.requires_grad = requires_grad != 0;
    shape.is_conj = is_conj != 0;
    shape.is_neg = is_neg != 0;
    return integers_into(shape.sizes, sizes) && integers_into(shape.strides, strides);
  }
  if (word == "value") {
    shape.value = PyTuple_GET_ITEM(tree, 1);
    return true;
  }
  PyObject* children = kind == nullptr ? nullptr : PyTuple_GET_ITEM(tree, 1);
  bool is_dict = word == "dict";
  bool is_well = (word == "tuple" || word == "list" || is_dict) && PyTuple_Check(children) &&
      PyTuple_GET_SIZE(tree) == (is_dict ? 3 : 2);
  if (is_well && is_dict) {
    shape.names = PyTuple_GET_ITEM(tree, 2);
    is_well = PyTuple_Check(shape.names) && PyTuple_GET_SIZE(shape.names) == PyTuple_GET_SIZE(children);
  }
  if (!is_well) {
    PyErr_SetString(PyExc_TypeError, "this is no shape of arguments");
    return false;
  }
  shape.kind = is_dict ? Kind::DICT : word == "list" ? Kind::LIST : Kind::TUPLE;
  shape.children.resize(static_cast<size_t>(PyTuple_GET_SIZE(children)));
  for (size_t i = 0; i < shape.children.size(); ++i)
    if (!read_shape(shape.children[i], PyTuple_GET_ITEM(children, static_cast<Py_ssize_t>(i)))) return false;
  return true;
}

bool is_same_value(PyObject* given, PyObject* expected) {
  if (given == expected) return true;
  if (Py_TYPE(given) != Py_TYPE(expected)) return false;
  if (PyFloat_CheckExact(given)) {
    double one_value = PyFloat_AS_DOUBLE(given), other = PyFloat_AS_DOUBLE(expected);
    return std::memcmp(&one_value, &other, sizeof(double)) == 0;
  }
  if (!PyLong_CheckExact(given) && !PyUnicode_CheckExact(given)) return false;
  return PyObject_RichCompareBool(given, expected, Py_EQ) == 1;
}

bool fits_tensor(const Shape& shape, PyObject* given) {
  if (Py_TYPE(given) != reinterpret_cast<PyTypeObject*>(THPVariableClass)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(given);
  return tensor.layout() == at::kStrided && tensor.requires_grad() == shape.requires_grad &&
      tensor.scalar_type() == shape.dtype && tensor.device() == shape.device && tensor.sizes().equals(shape.sizes) &&
      tensor.strides().equals(shape.strides) && tensor.is_conj() == shape.is_conj && tensor.is_neg() == shape.is_neg;
}

// Adds the tensors of an object that fits; none of them may be there twice.
bool fits(const Shape& shape, PyObject* given, std::vector<PyObject*>& tensors) {
  switch (shape.kind) {
    case Kind::TENSOR:
      if (!fits_tensor(shape, given) || std::find(tensors.begin(), tensors.end(), given) != tensors.end()) return false;
      tensors.push_back(given);
      return true;
    case Kind::VALUE:
      return is_same_value(given, shape.value);
    case Kind::DICT: {
      if (!PyDict_CheckExact(given) || PyDict_GET_SIZE(given) != static_cast<Py_ssize_t>(shape.children.size()))
        return false;
      Py_ssize_t at = 0, number = 0;
      PyObject *key, *value;
      while (PyDict_Next(given, &at, &key, &value)) {
        if (!is_same_value(key, PyTuple_GET_ITEM(shape.names, number))) return false;
        if (!fits(shape.children[static_cast<size_t>(number)], value, tensors)) return false;
        ++number;
      }
      return true;
    }
    default: {
      if (shape.kind == Kind::TUPLE ? !PyTuple_CheckExact(given) : !PyList_CheckExact(given)) return false;
      if (PySequence_Fast_GET_SIZE(given) != static_cast<Py_ssize_t>(shape.children.size())) return false;
      for (size_t i = 0; i < shape.children.size(); ++i)
        if (!fits(shape.children[i], PySequence_Fast_GET_ITEM(given, static_cast<Py_ssize_t>(i)), tensors)) return false;
      return true;
    }
  }
}

// Pattern(arguments, named): see read_shape
int pattern_init(PyObject* object, PyObject* arguments, PyObject*) {
  auto* self = reinterpret_cast<Pattern*>(object);
  PyObject *positional, *named;
  if (!PyArg_ParseTuple(arguments, "OO", &positional, &named)) return -1;
  if (!is_open(self->kept) || !keep(self->kept, arguments)) return -1;
  return read_shape(self->value.arguments, positional) && read_shape(self->value.named, named) ? 0 : -1;
}

// flat(arguments, named): the tensors of a call that surely fits, else None.
PyObject* pattern_flat(PyObject* object, PyObject* given) {
  const auto& value = reinterpret_cast<Pattern*>(object)->value;
  PyObject *arguments, *named;
  if (!PyArg_ParseTuple(given, "OO", &arguments, &named)) return nullptr;
  std::vector<PyObject*> tensors;
  bool is_fitting = fits(value.arguments, arguments, tensors) && fits(value.named, named, tensors);
  PyErr_Clear();
  if (!is_fitting) Py_RETURN_NONE;
  PyObject* found = PyTuple_New(static_cast<Py_ssize_t>(tensors.size()));
  for (size_t i = 0; found != nullptr && i < tensors.size(); ++i)
    PyTuple_SET_ITEM(found, static_cast<Py_ssize_t>(i), Py_NewRef(tensors[i]));
  return found;
}

PyMethodDef pattern_methods[] = {
    {"flat", guarded<pattern_flat>, METH_VARARGS, "flat(arguments, named) -> tuple of tensors, or None"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

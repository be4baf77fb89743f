//! Every row of the table, tried.

use super::*;
use crate::expression::evaluate;
use crate::{Mode, check_gradients};

/// The tensors of the examples that an example names.
fn named_in(example: &str, dtype: DType) -> Vec<(&'static str, Tensor)> {
    let words: Vec<&str> = example.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    examples(dtype).into_iter().filter(|(name, _)| words.contains(name)).collect()
}

#[test]
fn every_operation_has_the_gradient_it_says_it_has() {
    for operation in OPERATIONS {
        let example = operation.example;
        let inputs = named_in(example, DType::F64);
        let (floats, rest): (Vec<_>, Vec<_>) = inputs.into_iter().partition(|(_, tensor)| tensor.dtype() == DType::F64);
        let names: Vec<&str> = floats.iter().map(|(name, _)| *name).collect();
        let tensors: Vec<Tensor> = floats.iter().map(|(_, tensor)| tensor.clone()).collect();
        let run = |tensors: &[Tensor]| {
            let given = names.iter().copied().zip(tensors.iter().cloned()).chain(rest.iter().cloned());
            evaluate(example, &given.collect::<Vec<_>>(), DType::F64).unwrap_or_else(|e| panic!("{e}"))
        };
        if operation.has_gradient {
            let checked = check_gradients(run, &tensors);
            assert!(checked.is_ok(), "{example}: {}", checked.unwrap_err());
        } else {
            let asked: Vec<Tensor> = tensors.iter().map(Tensor::with_grad).collect();
            assert!(!run(&asked).requires_grad(), "{example}");
        }
    }
}

#[test]
fn every_operation_takes_the_elements_it_says_it_takes() {
    let mut wrong = Vec::new();
    for operation in OPERATIONS.iter().filter(|operation| operation.computed != Computed::Made) {
        for dtype in DType::ALL {
            let example = operation.example;
            // What is not an index or a condition has the type.
            let takes_bools = operation.takes == Takes::Bools;
            let given: Vec<(&str, Tensor)> = named_in(example, DType::F64)
                .into_iter()
                .map(|(name, tensor)| match (name, tensor.dtype()) {
                    ("c", DType::Bool) if takes_bools => (name, tensor.cast(dtype)),
                    (_, DType::F64) => (name, (tensor.abs() + 1.0).cast(dtype)),
                    _ => (name, tensor),
                })
                .collect();
            // Numbers with fractions are for floats, and comparisons make bools of anything.
            let example = example.replace("x * 0.4", "x").replace("-0.5, max=0.7", "0, max=1").replace("(x > 0)", "c");
            let made = evaluate(&example, &given, DType::F32);
            let computed = made.as_ref().is_ok_and(|tensor| tensor.realize().is_ok());
            if computed != operation.takes.has(dtype) {
                wrong.push(format!("{example} of {dtype}: {made:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_example_is_computed_alike_fused_and_one_by_one() {
    for operation in OPERATIONS {
        let run = |mode: Mode| {
            let tensor = evaluate(operation.example, &named_in(operation.example, DType::F32), DType::F32).unwrap();
            Tensor::realize_in(&[&tensor], mode).unwrap();
            tensor.to_f64().unwrap()
        };
        let (fused, eager) = (run(Mode::Fused), run(Mode::Eager));
        let is_close =
            |(a, b): (&f64, &f64)| a == b || (a - b).abs() <= 1e-5 * a.abs().max(1.0) || (a.is_nan() && b.is_nan());
        assert!(fused.iter().zip(&eager).all(is_close), "{}", operation.example);
        assert_eq!(fused.len(), eager.len());
    }
}

#[test]
fn names_are_different_and_every_example_uses_its_operation() {
    let operators = [
        ("+", "add"),
        ("-", "sub"),
        ("*", "mul"),
        ("/", "div"),
        ("%", "rem"),
        ("**", "pow"),
        ("==", "eq"),
        ("!=", "ne"),
        ("<", "lt"),
        ("<=", "le"),
        (">", "gt"),
        (">=", "ge"),
        ("&", "and"),
        ("|", "or"),
        ("~", "not"),
        ("-", "neg"),
        ("@", "matmul"),
        ("[", "slice"),
    ];
    for (at, operation) in OPERATIONS.iter().enumerate() {
        assert!(OPERATIONS[..at].iter().all(|other| other.name != operation.name), "{} twice", operation.name);
        let is_called = operation.example.contains(&format!("{}(", operation.name));
        let is_operator =
            operators.iter().any(|(symbol, name)| *name == operation.name && operation.example.contains(symbol));
        assert!(is_called || is_operator, "{} is not in {:?}", operation.name, operation.example);
    }
}

/// The guide's table is this one. `TENSOR_WASM_TEST_UPDATE=1` writes it.
#[test]
fn the_guide_has_this_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/TENSORS.md");
    let guide = std::fs::read_to_string(path).unwrap();
    let (begin, end) = ("<!-- operations -->\n", "<!-- /operations -->");
    let (before, rest) = guide.split_once(begin).expect("a place for the table");
    let (table, after) = rest.split_once(end).expect("an end of it");
    if std::env::var_os("TENSOR_WASM_TEST_UPDATE").is_some() {
        std::fs::write(path, format!("{before}{begin}\n{}\n{end}{after}", markdown())).unwrap();
        return;
    }
    assert_eq!(table.trim(), markdown().trim(), "run this test with TENSOR_WASM_TEST_UPDATE=1");
}

/// What another library makes of the same expressions, values and gradients: `make_operations.py` wrote it.
#[derive(serde::Deserialize)]
struct Fixture {
    inputs: std::collections::BTreeMap<String, Array>,
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Array {
    dtype: String,
    shape: Vec<usize>,
    elements: Vec<f64>,
}

#[derive(serde::Deserialize)]
struct Case {
    expression: String,
    result: Array,
    gradients: std::collections::BTreeMap<String, Vec<f64>>,
}

#[cfg(feature = "io")]
#[test]
fn pytorch_computes_the_same_values_and_gradients() {
    let file: Fixture = serde_json::from_str(include_str!("../../tests/fixtures/operations.json")).unwrap();
    let input = |name: &str, array: &Array| {
        let tensor = Tensor::from_vec(array.elements.clone(), &array.shape).cast(DType::named(&array.dtype).unwrap());
        (name.to_owned(), if tensor.dtype().is_float() { tensor.with_grad() } else { tensor })
    };
    let inputs: Vec<(String, Tensor)> = file.inputs.iter().map(|(name, array)| input(name, array)).collect();
    let given: Vec<(&str, Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    let is_close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1.0);
    let mut gradients = 0;
    for Case { expression, result, gradients: expected } in &file.cases {
        let found = evaluate(expression, &given, DType::F64).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(
            (found.shape().to_vec(), found.dtype().name()),
            (result.shape.clone(), &*result.dtype),
            "{expression}"
        );
        let elements = found.to_f64().unwrap();
        assert!(elements.iter().zip(&result.elements).all(is_close), "{expression}: {elements:?}");
        if expected.is_empty() {
            continue;
        }
        let count = i64::try_from(found.numel()).unwrap();
        let sizes: Vec<isize> = found.shape().iter().map(|size| size.cast_signed()).collect();
        let weights = Tensor::arange(0, count, 1, DType::F64).cos().reshape(&sizes);
        for (name, expected) in expected {
            let (_, asked) = given.iter().find(|(known, _)| known == name).unwrap();
            let slope = crate::grad(&(&found * &weights).sum(()), &[asked]).unwrap().remove(0).to_f64().unwrap();
            assert!(slope.iter().zip(expected).all(is_close), "{expression} by {name}: {slope:?} and not {expected:?}");
            gradients += 1;
        }
    }
    assert!(gradients > 90, "{gradients}");
    // Everything but what is made from nothing, by chance of our own, or by no type of theirs.
    let is_known = |operation: &&Operation| file.cases.iter().any(|case| case.expression == operation.example);
    let is_own =
        |operation: &&Operation| operation.computed == Computed::Made || ["dropout", "cast"].contains(&operation.name);
    let missing: Vec<&str> = OPERATIONS.iter().filter(|o| !is_known(o) && !is_own(o)).map(|o| o.name).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

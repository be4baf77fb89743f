//! What is written is read again; what lies is refused, in words.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;

use super::*;

const ROWS: &[u8] = include_bytes!("../../tests/fixtures/rows.npy");
const COLUMNS: &[u8] = include_bytes!("../../tests/fixtures/columns.npy");
const BIG: &[u8] = include_bytes!("../../tests/fixtures/big.npy");
const SCALAR: &[u8] = include_bytes!("../../tests/fixtures/scalar.npy");
const STORED: &[u8] = include_bytes!("../../tests/fixtures/stored.npz");
const DEFLATED: &[u8] = include_bytes!("../../tests/fixtures/deflated.npz");

fn no_metadata() -> BTreeMap<String, String> {
    BTreeMap::new()
}

/// Type, shape, and the bytes of all elements.
fn bits(tensor: &Tensor) -> (DType, Shape, Vec<u8>) {
    let value = tensor.value().unwrap();
    let Ok(bytes) = element_bytes(&value, tensor.dtype()) else { panic!("no memory") };
    (tensor.dtype(), tensor.shape(), bytes.into_owned())
}

/// Some elements of any type, of which all are finite.
fn some(dtype: DType, sizes: &[usize]) -> Tensor {
    match dtype {
        DType::Bool => Tensor::bernoulli(sizes, 0.5, 3),
        _ if dtype.is_float() => (Tensor::uniform(sizes, 3, DType::F64) - 0.5).exp().cast(dtype),
        _ => (Tensor::uniform(sizes, 3, DType::F64) * 255.0).cast(dtype),
    }
}

fn refused<T>(result: Result<T>, expected: &str) {
    let Err(error) = result else { panic!("it was taken, and not {expected:?}") };
    let error = error.to_string();
    assert!(error.contains(expected), "{error}\ndoes not say\n{expected}");
    assert!(!error.contains('\n') && error.len() < 400 && error.contains("src/io/tests.rs:"), "{error}");
}

fn npy(version: u8, header: &[u8], elements: usize) -> Vec<u8> {
    let mut file = b"\x93NUMPY".to_vec();
    file.extend([version, 0]);
    if version == 1 {
        file.extend(u16::try_from(header.len()).unwrap().to_le_bytes());
    } else {
        file.extend(u32::try_from(header.len()).unwrap().to_le_bytes());
    }
    file.extend(header);
    file.extend(vec![1; elements]);
    file
}

fn described(descr: &str, order: &str, shape: &str) -> Vec<u8> {
    format!("{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n").into_bytes()
}

fn safetensors(header: &[u8], elements: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, &vec![1; elements]].concat()
}

#[test]
fn every_type_and_shape_is_read_as_it_was_written() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in DType::ALL {
        for sizes in [&[][..], &[0], &[1], &[1000], &[3, 5], &[2, 0, 3], &[1, 2, 1, 2, 1, 2, 1, 2]] {
            let tensor = some(dtype, sizes);
            let expected = bits(&tensor);
            let path = folder.path().join("x");
            if dtype != DType::BF16 {
                save_npy(&path, &tensor).unwrap();
                assert_eq!(bits(&load_npy(&path).unwrap()), expected);
                save_npz(&path, [("a", tensor.clone()), ("b/ü", tensor.clone())]).unwrap();
                let read = load_npz(&path).unwrap();
                assert_eq!((bits(&read["a"]), bits(&read["b/ü"])), (expected.clone(), expected.clone()));
            }
            let metadata = BTreeMap::from([("made by".to_owned(), "\"us\"".to_owned())]);
            let other = some(DType::U8, &[3]);
            save_safetensors_with(&path, [("x", tensor.clone()), ("a", other.clone())], &metadata).unwrap();
            let read = load_safetensors(&path).unwrap();
            assert_eq!((bits(&read.tensors["x"]), bits(&read.tensors["a"])), (expected.clone(), bits(&other)));
            assert_eq!(read.metadata, metadata);
            if !sizes.contains(&0) {
                assert_eq!(bits(&from_json(&to_json(&tensor).unwrap(), dtype).unwrap()), expected);
            }
            if sizes == [3, 5] {
                save_csv(&path, &tensor).unwrap();
                assert_eq!(bits(&load_csv(&path, dtype, CsvFormat::default()).unwrap()), expected);
                // A view is written as what it shows.
                let (turned, mut file) = (tensor.t(), Vec::new());
                write_safetensors(&mut file, [("x", turned.clone())], &no_metadata()).unwrap();
                assert_eq!(bits(&read_safetensors(&file).unwrap().tensors["x"]), bits(&turned));
            }
        }
    }
    // Nothing was left beside what was saved.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    refused(save_npy(folder.path().join("y"), &some(DType::BF16, &[2])), "NumPy has no bf16; make it f32 with .cast(");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn files_of_numpy_are_read_and_columns_are_not_moved() {
    let numbers = Tensor::arange(0, 6, 1, DType::F32).reshape(&[2, 3]);
    assert_eq!(bits(&read_npy(ROWS).unwrap()), bits(&numbers));
    // What is written is what NumPy writes, to the byte.
    let mut file = Vec::new();
    write_npy(&mut file, &numbers).unwrap();
    assert_eq!(file, ROWS);
    let columns = read_npy(COLUMNS).unwrap();
    assert_eq!(columns.value().unwrap().layout.strides(), [1, 2]);
    assert_eq!(bits(&columns), bits(&numbers.cast(DType::F64)));
    assert_eq!(bits(&read_npy(BIG).unwrap()), bits(&numbers.cast(DType::I32)));
    assert_eq!(bits(&read_npy(SCALAR).unwrap()), bits(&Tensor::scalar(1.5, DType::F16)));
    for file in [STORED, DEFLATED] {
        assert_eq!(bits(&read_npz(file).unwrap()["weight"]), bits(&numbers));
    }
    let stored = read_npz(STORED).unwrap();
    assert_eq!(stored["flag"].to_vec::<bool>().unwrap(), [true, false]);
    assert_eq!(stored["none"].shape()[..], [0, 3]);
    assert_eq!(bits(&read_npz(DEFLATED).unwrap()["zeros"]), bits(&Tensor::zeros(&[100, 10], DType::I64)));
    // Every version, both byte orders, and ways to write a header.
    for version in 1..=3 {
        assert_eq!(read_npy(&npy(version, &described("'>i4'", "False", "(2, 3)"), 24)).unwrap().shape()[..], [2, 3]);
    }
    let tight = br#"{"shape":(3L,),"fortran_order":True,"descr":"|u1"}"#;
    assert_eq!(read_npy(&npy(1, tight, 3)).unwrap().to_vec::<u8>().unwrap(), [1, 1, 1]);
}

#[test]
fn npy_files_that_lie_are_refused_in_words() {
    let of = |descr: &str, shape: &str, elements: usize| npy(1, &described(descr, "False", shape), elements);
    for (file, expected) in [
        (Vec::new(), "the bytes given: it is not an .npy file"),
        (b"PK\x03\x04 an .npz".to_vec(), "not an .npy file"),
        (b"\x93NUMPY".to_vec(), "cut off: it ends in its header, after 6 bytes"),
        (b"\x93NUMPY\x02\0\xff\xff\xff\xff{".to_vec(), "cut off"),
        (npy(4, b"{}", 0), "version 4.0; known are 1.0, 2.0 and 3.0"),
        (npy(2, &vec![b' '; 1 << 17], 0), "its header has 131072 bytes, and at most 65536 are read"),
        (of("'|O'", "(3,)", 24), "Python objects"),
        (of("[('a', '<f4')]", "(3,)", 12), "records of several fields; save one field of it"),
        (of("'<u2'", "(3,)", 6), "convert them with array.astype(\"int32\")"),
        (of("'<c8'", "(3,)", 24), "its elements are \"<c8\"; known are bool u8 i32"),
        (of("'=f4'", "(3,)", 12), "known are bool"),
        (of("'<f4'", "(3,)", 11), "cut off: it says shape [3] of f32, 12 bytes, and 11 are there"),
        (of("'<f4'", "(3,)", 13), "12 bytes, and 1 more are there"),
        (of("'<f4'", "(9223372036854775808,)", 8), "more than any memory holds"),
        (of("'<f4'", "(4294967296, 4294967296)", 8), "more than any memory holds"),
        (of("'<f4'", "(4611686018427387904, 0, 4)", 0), "more than any memory holds"),
        (of("'<f4'", "(18446744073709551616,)", 8), "a size of 18446744073709551616"),
        (of("'<f4'", "(1000000000000,)", 8), "cut off"),
        (of("'<f4'", "(-1,)", 8), "a number of elements was expected at \"-1,"),
        (of("'<f4'", &format!("({})", "1,".repeat(9)), 4), "it has 9 axes, and a tensor at most 8"),
        (of("'<f4'", &format!("({})", "1,".repeat(65)), 4), "more than 64 axes"),
        (of("'<f4'", &format!("({},)", "9".repeat(5000)), 8), "a size of 9999"),
        (npy(1, b"{'descr': '\xff\xfe'}", 0), "a text in UTF-8 was expected"),
        (npy(1, b"{'more': ''}", 0), "has \"more\", which means nothing"),
        (npy(1, b"{'shape': (), 'shape': ()}", 0), "says shape twice"),
        (npy(1, b"{'descr': '<f4', 'fortran_order': False}", 0), "does not say shape"),
        (npy(1, b"[]", 0), "its header is damaged: '{' was expected at \"[]\""),
        (npy(1, b"{'descr': '|b1', 'fortran_order': False, 'shape': (1,)} x", 1), "its end was expected"),
    ] {
        refused(read_npy(&file), expected);
    }
    let mut bool = of("'|b1'", "(3,)", 3);
    *bool.last_mut().unwrap() = 2;
    refused(read_npy(&bool), "element 2 is the byte 2, and a bool is 0 or 1");
}

/// An archive, as its parts lie in it: the last 22 bytes are its end, an entry of its directory has 46 and a name.
#[test]
fn npz_files_that_lie_are_refused_in_words() {
    let one = |name: &str, contents: &[u8]| {
        let mut file = Vec::new();
        let mut archive = zip::ArchiveWriter::new(&mut file);
        assert!(archive.add(name, &[contents]).is_ok() && archive.finish().is_ok());
        file
    };
    let good = one("a.npy", ROWS);
    assert_eq!(read_npz(&good).unwrap().len(), 1);
    let (end, entry) = (good.len() - 22, good.len() - 22 - 46 - 5);
    let with = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    let huge = u32::MAX.to_le_bytes();
    // The same with its numbers in fields of 64 bits, as archives of four gigabytes have them.
    let wide = |entries: u64| {
        let mut file = good[..end].to_vec();
        file[entry + 20..entry + 28].fill(0xff);
        file[entry + 42..entry + 46].fill(0xff);
        file[entry + 30] = 28;
        let bytes = ROWS.len() as u64;
        file.extend([1, 0, 24, 0]);
        [bytes, bytes, 0].iter().for_each(|number| file.extend(number.to_le_bytes()));
        let record = file.len() as u64;
        file.extend(b"PK\x06\x06");
        file.extend([44, 0, 0, 0, 0, 0, 0, 0, 45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        [entries, entries, 51 + 28, entry as u64].iter().for_each(|number| file.extend(number.to_le_bytes()));
        file.extend(b"PK\x06\x07\0\0\0\0");
        file.extend(record.to_le_bytes());
        file.extend([1, 0, 0, 0]);
        file.extend(&good[end..]);
        let end = file.len() - 22;
        file[end + 8..end + 20].fill(0xff);
        file
    };
    assert_eq!(bits(&read_npz(&wide(1)).unwrap()["a"]), bits(&read_npy(ROWS).unwrap()));
    refused(read_npz(&wide(u64::MAX)), "its directory ends in an entry");
    for (file, expected) in [
        (Vec::new(), "it does not end as a zip archive"),
        (ROWS.to_vec(), "it does not end as a zip archive"),
        (one("a.txt", b"x"), "\"a.txt\": it is no .npy, and not read here"),
        (one("a.npy", b"x"), "\"a.npy\": it is not an .npy file"),
        (with(end + 4, &[1]), "one of several parts"),
        (with(end + 8, &[2, 0, 2, 0]), "its directory ends in an entry"),
        (with(end + 8, &[0, 0, 0, 0]), "more entries than it says"),
        (with(end + 16, &huge), "it refers to where it has nothing"),
        (with(end + 12, &huge), "it refers to where it has nothing"),
        (with(entry, &[0]), "an entry that is none"),
        (with(entry + 8, &[1]), "\"a.npy\": it is encrypted; decrypt it first"),
        (with(entry + 10, &[12]), "it is packed by method 12; known are stored and deflated"),
        (with(entry + 16, &[0; 4]), "\"a.npy\": it is damaged: its checksum is another"),
        (with(entry + 24, &huge), "it is stored, with two sizes"),
        (with(entry + 10, &[8]), "\"a.npy\": "),
        (with(entry + 42, &[1]), "not where the directory says"),
        (with(entry + 42, &huge), "it refers to where it has nothing"),
        (with(entry + 46, &[0xff]), "its name is not UTF-8"),
        (with(30, b"b"), "not where the directory says"),
        (with(28, &[0xff, 0xff]), "it ends behind the directory"),
    ] {
        refused(read_npz(&file), expected);
    }
    // A size that no deflating has, before anything is inflated.
    let mut bomb = with(entry + 10, &[8]);
    bomb[entry + 24..entry + 28].copy_from_slice(&u32::MAX.wrapping_sub(1).to_le_bytes());
    refused(read_npz(&bomb), "bytes are not inflated to 4294967294");
    // Two members that are the same bytes: a directory with the entry twice.
    let mut twice = good[..end].to_vec();
    twice.extend(&good[entry..end]);
    let renamed = twice.len() - 5;
    twice[renamed] = b'b';
    twice.extend(&good[end..]);
    let end = twice.len() - 22;
    twice[end + 8..end + 12].copy_from_slice(&[2, 0, 2, 0]);
    twice[end + 12..end + 16].copy_from_slice(&(2_u32 * 51).to_le_bytes());
    refused(read_npz(&twice), "\"b.npy\": it is damaged: it is not where the directory says");
    twice[renamed] = b'a';
    refused(read_npz(&twice), "\"a.npy\" is in it twice");
    // A member inside of another, which is where it says: the same bytes would be inflated for both.
    let inner = one("b.npy", ROWS);
    let outer = one("a.npy", &inner[..35 + ROWS.len()]);
    let (outer_entry, inner_entry) = (outer.len() - 22 - 51, inner.len() - 22 - 51);
    let mut nested = outer[..outer.len() - 22].to_vec();
    nested.extend(&inner[inner_entry..inner.len() - 22]);
    let offset = nested.len() - 51 + 42;
    nested[offset] = 35;
    nested.extend(&outer[outer.len() - 22..]);
    let end = nested.len() - 22;
    nested[end + 8..end + 12].copy_from_slice(&[2, 0, 2, 0]);
    nested[end + 12] = 102;
    assert_eq!(usize::from(nested[end + 16]), outer_entry % 256);
    refused(read_npz(&nested), "\"a.npy\" and \"b.npy\" overlap in it");
    // A bomb that says what it is, and a limit that is asked for.
    let header = described("'|u1'", "False", "(1000000,)");
    let mut inflated = npy(1, &header, 0);
    inflated.resize(inflated.len() + 1_000_000, 7);
    let mut packed = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
    packed.write_all(&inflated).unwrap();
    let packed = packed.finish().unwrap();
    let mut file = one("a.npy", &packed);
    let entry = file.len() - 22 - 51;
    let mut crc = flate2::Crc::new();
    crc.update(&inflated);
    file[entry + 10] = 8;
    file[entry + 16..entry + 20].copy_from_slice(&crc.sum().to_le_bytes());
    file[entry + 24..entry + 28].copy_from_slice(&u32::try_from(inflated.len()).unwrap().to_le_bytes());
    assert_eq!(read_npz(&file).unwrap()["a"].numel(), 1_000_000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bomb.npz");
    fs::write(&path, &file).unwrap();
    assert_eq!(load_npz_within(&path, 1_000_200).unwrap()["a"].numel(), 1_000_000);
    refused(load_npz_within(&path, 1000), "bomb.npz: it unpacks to 1000");
    // Shorter than it says, and longer.
    for (more, expected) in [(1, "cut off"), (-1, "1000000 bytes, and 999999 are there")] {
        let mut lying = file.clone();
        let size = i64::try_from(inflated.len()).unwrap() + more;
        lying[entry + 24..entry + 28].copy_from_slice(&u32::try_from(size).unwrap().to_le_bytes());
        refused(read_npz(&lying), if more > 0 { "1 more are there" } else { expected });
    }
}

#[test]
fn safetensors_that_lie_are_refused_in_words() {
    let one = |dtype: &str, shape: &str, span: &str| {
        format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{span}}}}}"#).into_bytes()
    };
    let two = |a: &str, b: &str| {
        let entry = |span: &str| format!(r#"{{"dtype":"U8","shape":[4],"data_offsets":{span}}}"#);
        format!(r#"{{"a":{},"b":{}}}"#, entry(a), entry(b)).into_bytes()
    };
    // Whole, and in pieces.
    let streamed = |file: &[u8]| {
        let mut from = std::io::Cursor::new(file);
        let header = SafetensorsHeader::read(&mut from, file.len() as u64, 1 << 20)?;
        header.check_elements(std::io::Cursor::new(file))?;
        header.read_elements(from)
    };
    let deep = [b"{\"w\":".to_vec(), vec![b'['; 1 << 16]].concat();
    for (file, expected) in [
        (Vec::new(), "it is cut off, or no safetensors file: it has 0 bytes"),
        (u64::MAX.to_le_bytes().to_vec(), "it says that its header has 18446744073709551615 bytes, and 0 are there"),
        (safetensors(b"{\"\xff\":", 0), "its header is not UTF-8, from byte 10 on"),
        (safetensors(b"{", 0), "its header is no such thing: EOF"),
        (safetensors(b"[]", 0), "an object with a tensor for each name"),
        (safetensors(&deep, 0), "\"w\": "),
        (safetensors(b"{\"w\":{\"dtype\":\"F32\"}}", 0), "\"w\": missing field `shape`"),
        (safetensors(b"{\"__metadata__\":{\"a\":1}}", 0), "\"__metadata__\": invalid type: integer `1`"),
        (safetensors(&one("F8_E4M3", "[4]", "[0,4]"), 4), "\"w\": its elements are \"F8_E4M3\"; known are BOOL U8"),
        (safetensors(&one("F32", "[4]", "[0,4]"), 4), "\"w\": shape [4] of f32 has 16 bytes, and it says 4"),
        (safetensors(&one("F32", "[4]", "[0,16]"), 15), "\"w\": it says bytes 0 to 16 of 15: the file is cut off"),
        (safetensors(&one("F32", "[0]", "[4,0]"), 4), "\"w\": it says bytes 4 to 0 of 4"),
        (safetensors(&one("F32", "[1]", "[4,8]"), 8), "\"w\": it leaves a gap before it, at byte 4"),
        (safetensors(&one("F32", "[1]", "[0,4]"), 8), "4 bytes at its end belong to no tensor"),
        (safetensors(&one("F32", "[9223372036854775808]", "[0,4]"), 4), "\"w\": it says shape [9223372036854775808]"),
        (safetensors(&one("F32", "[4294967296,4294967296]", "[0,0]"), 0), "which is more than any memory holds"),
        (safetensors(&one("F32", "[99999999999999999999]", "[0,0]"), 0), "\"w\": "),
        (safetensors(&one("F32", "[-1]", "[0,0]"), 0), "\"w\": invalid value: integer `-1`"),
        (safetensors(&one("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4), "\"w\": it has 9 axes, and a tensor at most 8"),
        (safetensors(&one("BOOL", "[1]", "[0,1]"), 1), ""),
        (safetensors(&two("[0,4]", "[2,6]"), 6), "\"b\": it overlaps with another tensor, at byte 2"),
        (safetensors(&two("[0,4]", "[0,4]"), 4), "it overlaps with another tensor, at byte 0"),
        (safetensors(&two("[0,4]", "[18446744073709551615,3]"), 8), "\"b\": it says bytes 18446744073709551615 to 3"),
        (
            safetensors(&String::from_utf8(two("[0,4]", "[4,8]")).unwrap().replace("\"b\"", "\"a\"").into_bytes(), 8),
            "\"a\": there are two of that name",
        ),
    ] {
        if expected.is_empty() {
            assert!(read_safetensors(&file).is_ok() && streamed(&file).is_ok());
            let mut bad = file;
            *bad.last_mut().unwrap() = 7;
            refused(read_safetensors(&bad), "\"w\": element 0 is the byte 7, and a bool is 0 or 1");
            refused(streamed(&bad), "\"w\": element 0 is the byte 7, and a bool is 0 or 1");
        } else {
            refused(read_safetensors(&file), expected);
            refused(streamed(&file), expected);
        }
    }
    let file = safetensors(&one("F32", "[2]", "[0,8]"), 8);
    let read = |bytes: &[u8], header_bytes_max| SafetensorsHeader::read(bytes, file.len() as u64, header_bytes_max);
    refused(read(&file, 10), "its header has 54 bytes, and at most 10 are read");
    refused(read(&file[..20], 1000), "it became shorter while it was read");
    let cut = &file[file.len() - 8..file.len() - 1];
    refused(read(&file, 1000).unwrap().read_elements(cut), "\"w\": it became shorter while it was read");
    let (x, mut to) = (some(DType::F32, &[1]), Vec::new());
    let pair = [("x", x.clone()), ("x", x.clone())];
    refused(write_safetensors(&mut to, pair, &no_metadata()), "\"x\": there are two of that name");
    refused(write_safetensors(&mut to, [("__metadata__", x)], &no_metadata()), "that name has another meaning");
}

#[test]
fn text_that_is_no_tensor_is_refused_with_its_place() {
    for (text, dtype, expected) in [
        ("", DType::F32, "line 1, column 0: a number or a list was expected, and not the end"),
        ("[1, 2", DType::F32, "',' or ']' was expected"),
        ("[1,\n 2,]", DType::F32, "line 2, column 3: a number or a list was expected, and not ']'"),
        ("[[1, 2],\n [3]]", DType::F32, "line 2, column 4: a list has 1 elements where others have 2"),
        ("[[1], 2]", DType::F32, "a number is where other lists have lists"),
        ("[1, [2]]", DType::F32, "a list is where other lists have numbers"),
        ("[[], 1]", DType::F32, "a number is where other lists have lists"),
        ("[[], [1]]", DType::F32, "a list has 1 elements where others have 0"),
        ("[1] 2", DType::F32, "there is something behind the end"),
        ("{}", DType::F32, "a number or a list was expected, and not '{'"),
        ("[NaN]", DType::F32, "\"NaN\" is no f32"),
        ("[01]", DType::F32, "\"01\" is no f32"),
        ("[1.]", DType::F64, "\"1.\" is no f64"),
        ("[true]", DType::F32, "\"true\" is no f32"),
        ("[1]", DType::Bool, "\"1\" is no bool"),
        ("[1.5]", DType::I64, "\"1.5\" is no i64"),
        ("[256]", DType::U8, "\"256\" is no u8"),
        ("[9223372036854775808]", DType::I64, "is no i64"),
        ("[1e39]", DType::F32, "\"1e39\" is more than f32 holds"),
        ("[70000]", DType::F16, "\"70000\" is more than f16 holds"),
        ("[[[[[[[[[1]]]]]]]]]", DType::F32, "nested deeper than the 8 axes of a tensor"),
    ] {
        refused(from_json(text, dtype), expected);
    }
    refused(from_json(&"[".repeat(1 << 20), DType::F32), "nested deeper");
    assert_eq!(from_json(" [ [1, -2.5e1] ,[3 , 4] ] ", DType::F32).unwrap().to_vec::<f32>().unwrap()[1], -25.0);
    assert_eq!(from_json("[[],[]]", DType::F32).unwrap().shape()[..], [2, 0]);
    assert_eq!(from_json("7", DType::U8).unwrap().item::<u8>().unwrap(), 7);
    assert_eq!(to_json(&Tensor::arange(0, 4, 1, DType::F32).reshape(&[2, 2])).unwrap(), "[[0.0,1.0],[2.0,3.0]]");
    assert_eq!(to_json(&Tensor::zeros(&[2, 0], DType::F32)).unwrap(), "[[],[]]");
    refused(to_json(&Tensor::zeros(&[1 << 40, 0], DType::F32)), "more than 1048576 lists of nothing");
    refused(to_json(&Tensor::full(&[2], f64::NAN, DType::F32)), "element 0 is NaN, which JSON cannot say");
    let plain = CsvFormat::default();
    for (text, expected) in [
        (&b"1,2\n3\n"[..], "line 2 has 1 columns, and those before have 2; all have the same"),
        (b"a,b\n1,2\n", "line 1, column 1: \"a\" is no f32"),
        (b"1,2\n3,x\n", "line 2, column 2: \"x\" is no f32"),
        (b"1,2\n\n\r\n3,x\n", "line 4, column 2: \"x\" is no f32"),
        (b"1,\n", "line 1, column 2: \"\" is no f32"),
        (b"1,2\n3,\xff\n", "is not UTF-8"),
        (b"1e99,2\n", "\"1e99\" is more than f32 holds"),
    ] {
        refused(read_csv(text, DType::F32, plain), expected);
    }
    let table = read_csv(b"x; y\n\n1;\"2\"\r\nnan;-inf", DType::F32, CsvFormat { delimiter: b';', has_header: true });
    let table = table.unwrap().to_vec::<f32>().unwrap();
    assert!(table[..2] == [1.0, 2.0] && table[2].is_nan() && table[3] == f32::NEG_INFINITY);
    assert_eq!(read_csv(b"", DType::F32, plain).unwrap().shape()[..], [0, 0]);
    refused(write_csv(&mut Vec::new(), &Tensor::zeros(&[2], DType::F32)), "a table has two axes, and shape [2] has 1");
}

#[test]
fn idx_files_are_read_and_those_that_lie_refused() {
    let read = |bytes: &[u8]| read_idx(bytes).unwrap();
    assert_eq!(read(&[0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 3, 7, 8, 9]).to_vec::<u8>().unwrap(), [7, 8, 9]);
    assert_eq!(read(&[0, 0, 9, 1, 0, 0, 0, 2, 0xff, 5]).to_vec::<i32>().unwrap(), [-1, 5]);
    assert_eq!(read(&[0, 0, 11, 1, 0, 0, 0, 2, 0xff, 0xfe, 1, 0]).to_vec::<i32>().unwrap(), [-2, 256]);
    assert_eq!(read(&[0, 0, 12, 0, 0x80, 0, 0, 0]).item::<i32>().unwrap(), i32::MIN);
    assert_eq!(read(&[0, 0, 13, 1, 0, 0, 0, 1, 0x3f, 0xc0, 0, 0]).to_vec::<f32>().unwrap(), [1.5]);
    assert_eq!(read(&[0, 0, 14, 1, 0, 0, 0, 1, 0xbf, 0xf8, 0, 0, 0, 0, 0, 0]).to_vec::<f64>().unwrap(), [-1.5]);
    for (file, expected) in [
        (&[][..], "cut off: it ends in its header, after 0 bytes"),
        (&[0x1f, 0x8b, 8, 0], "it is compressed; unpack it with gunzip first"),
        (&[1, 0, 8, 1], "it does not begin with two zeros"),
        (&[0, 0, 10, 1, 0, 0, 0, 0], "it says element type 0x0a"),
        (&[0, 0, 8, 255, 0, 0], "cut off"),
        (&[0, 0, 8, 1, 0, 0, 0, 4, 1, 2, 3], "cut off: shape [4] has 4 bytes, and 3 are there"),
        (&[0, 0, 8, 1, 0, 0, 0, 1, 1, 2], "longer than it says"),
        (&[0, 0, 8, 2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1], "more than any memory holds"),
    ] {
        refused(read_idx(file), expected);
    }
    let axes = [&[0, 0, 8, 9][..], &[0, 0, 0, 1].repeat(9), &[1]].concat();
    refused(read_idx(&axes), "it has 9 axes, and a tensor at most 8");
}

#[test]
fn every_prefix_of_a_file_is_an_error() {
    let mut tensors = Vec::new();
    write_safetensors(&mut tensors, [("a", some(DType::F32, &[3])), ("b", some(DType::Bool, &[2]))], &no_metadata())
        .unwrap();
    let idx = [0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 3, 7, 8, 9];
    for cut in 0..tensors.len() {
        assert!(read_safetensors(&tensors[..cut]).is_err(), "{cut}");
    }
    for file in [ROWS, COLUMNS, BIG, SCALAR] {
        (0..file.len()).for_each(|cut| assert!(read_npy(&file[..cut]).is_err(), "{cut}"));
    }
    for file in [STORED, DEFLATED] {
        (0..file.len()).for_each(|cut| assert!(read_npz(&file[..cut]).is_err(), "{cut}"));
    }
    (0..idx.len()).for_each(|cut| assert!(read_idx(&idx[..cut]).is_err(), "{cut}"));
    let json = to_json(&some(DType::F64, &[3, 2])).unwrap();
    (0..json.len()).for_each(|cut| assert!(from_json(&json[..cut], DType::F64).is_err(), "{cut}"));
    // A table is cut where nobody sees it only at the end of a line, or in a number.
    let table = b"1,2,3\n4,5,6\n";
    let is_read = |cut: &usize| read_csv(&table[..*cut], DType::F32, CsvFormat::default()).is_ok();
    assert_eq!((0..table.len()).filter(is_read).collect::<Vec<_>>(), [0, 1, 3, 5, 6, 11]);
}

#[test]
fn mapped_tensors_share_the_file_and_outlive_its_replacement() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let (x, flags) = (some(DType::F32, &[4096]), some(DType::Bool, &[7]));
    save_safetensors(&path, [("x", x.clone()), ("flags", flags.clone())]).unwrap();
    let read = load_safetensors(&path).unwrap();
    let value = read.tensors["x"].value().unwrap();
    let buffer = value.storage.cpu().unwrap();
    // It begins at a page, and elements 64 bytes or a multiple behind that: nothing was moved.
    let header = u64::from_le_bytes(fs::read(&path).unwrap()[..8].try_into().unwrap());
    assert_eq!(buffer.as_ptr() as usize % 4096, usize::try_from(8 + header).unwrap() % 4096);
    // Over the file that is mapped: it is another file then, and what was mapped stays.
    save_safetensors(&path, [("x", &read.tensors["x"] * 2.0)]).unwrap();
    assert_eq!(bits(&read.tensors["x"]), bits(&x));
    assert_eq!(bits(&read.tensors["flags"]), bits(&flags));
    assert_eq!(bits(&load_safetensors(&path).unwrap().tensors["x"]), bits(&(x.clone() * 2.0)));
    // Elements that are not aligned are copied.
    let header = br#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    fs::write(&path, safetensors(header, 9)).unwrap();
    let odd = load_safetensors(&path).unwrap();
    assert_eq!(odd.tensors["w"].to_vec::<f32>().unwrap(), [f32::from_bits(0x0101_0101); 2]);
    // What is no file says so.
    refused(load_safetensors(folder.path()), "it is not a regular file");
    refused(load_safetensors(folder.path().join("none")), "No such file");
    refused(load_npy("/dev/zero"), "/dev/zero: it is not a regular file");
    refused(save_npy(folder.path(), &x), "it is there and is not a regular file");
    refused(save_npy(folder.path().join("no/where"), &x), "No such file");
    fs::write(&path, b"").unwrap();
    refused(load_safetensors(&path), "it has 0 bytes");
    // A link stays a link.
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    save_npy(&link, &x).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(bits(&load_npy(&path).unwrap()), bits(&x));
    // A tensor that cannot be computed says why it cannot.
    let failed = save_npy(&path, &(&x + &flags));
    assert!(failed.unwrap_err().to_string().starts_with("add: operands are f32 and bool"));
}

//! Tables of numbers, with commas or whatever else between them. A table has two axes: lines and columns.

use std::io::Write;
use std::panic::Location;
use std::path::Path;

use super::{FileCall, Parsed, TextElements, Why, for_each_text, read_all, save, shortened};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::{Caller, Tensor};

/// How a table is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CsvFormat {
    /// What is between two columns.
    pub delimiter: u8,
    /// Whether the first line says what the columns are, and is left out.
    pub has_header: bool,
}

impl Default for CsvFormat {
    /// Commas, no header.
    fn default() -> CsvFormat {
        CsvFormat { delimiter: b',', has_header: false }
    }
}

/// Reads a table. Empty lines are left out; spaces around numbers too.
#[track_caller]
pub fn load_csv(path: impl AsRef<Path>, dtype: DType, format: CsvFormat) -> Result<Tensor> {
    let path = path.as_ref();
    FileCall::on("load_csv", path, Location::caller()).run(|at| read(&read_all(path)?, dtype, format, at))
}

/// Reads what is in such a file.
#[track_caller]
pub fn read_csv(bytes: &[u8], dtype: DType, format: CsvFormat) -> Result<Tensor> {
    FileCall::on_bytes("read_csv", Location::caller()).run(|at| read(bytes, dtype, format, at))
}

/// Writes a tensor of two axes as a table.
#[track_caller]
pub fn save_csv(path: impl AsRef<Path>, tensor: &Tensor) -> Result<()> {
    let path = path.as_ref();
    FileCall::on("save_csv", path, Location::caller()).run(|_| save(path, |file| write(file, tensor)))
}

/// Writes what such a file has.
#[track_caller]
pub fn write_csv(mut writer: impl Write, tensor: &Tensor) -> Result<()> {
    FileCall::on_bytes("write_csv", Location::caller()).run(|_| write(&mut writer, tensor))
}

fn write(to: &mut impl Write, tensor: &Tensor) -> Parsed<()> {
    let (shape, value) = (tensor.shape(), tensor.value()?);
    let [_, columns] = shape[..] else {
        return Err(format!("a table has two axes, and shape {shape} has {}; reshape it first", shape.rank()).into());
    };
    let mut count = 0;
    for_each_text(&value, tensor.dtype(), |element| {
        count += 1;
        let end = if count % columns == 0 { '\n' } else { ',' };
        Ok(write!(to, "{element}{end}")?)
    })
}

fn read(bytes: &[u8], dtype: DType, format: CsvFormat, at: Caller) -> Parsed<Tensor> {
    // Lengths are compared here, where the message can say more.
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(format.delimiter)
        .has_headers(format.has_header)
        .flexible(true)
        .trim(csv::Trim::All)
        .from_reader(bytes);
    let mut elements = TextElements::new(dtype);
    let (mut lines, mut columns) = (0, None);
    let mut record = csv::ByteRecord::new();
    while reader.read_byte_record(&mut record).map_err(|error| error.to_string())? {
        let line = record.position().map_or(0, |position| position.line() + skipped_lines(bytes, position.byte()));
        let known = *columns.get_or_insert(record.len());
        if record.len() != known {
            let why = format!("line {line} has {} columns, and those before have {known}", record.len());
            return Err(format!("{why}; all have the same, and has_header leaves out the first").into());
        }
        for (column, text) in record.iter().enumerate() {
            let of = |why: Why| why.of(&format!("line {line}, column {}", column + 1));
            let Ok(text) = std::str::from_utf8(text) else {
                return Err(of(format!("{:?} is not UTF-8", shortened(text)).into()));
            };
            elements.push(text).map_err(of)?;
        }
        lines += 1;
    }
    elements.tensor(&[lines, columns.unwrap_or(0)], at)
}

/// Empty lines before a record: it is said to begin in front of them.
fn skipped_lines(bytes: &[u8], from: u64) -> u64 {
    let rest = usize::try_from(from).ok().and_then(|from| bytes.get(from..)).unwrap_or_default();
    let empty = rest.iter().take_while(|byte| matches!(byte, b'\r' | b'\n'));
    empty.filter(|byte| **byte == b'\n').map(|_| 1).sum()
}

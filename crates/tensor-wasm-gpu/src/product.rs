//! Matrix products by the device's own library, cuBLASLt: loaded and launched like a kernel, from an image that says
//! what is multiplied.

/// What the elements are, of both operands and of the result. Sums have at least the precision of `F32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProductElement {
    F16,
    BF16,
    F32,
    /// `F32`, rounded to ten bits of mantissa before it is multiplied.
    Tf32,
    F64,
}

/// What is done to a sum, with everything that is added to it, before it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProductEpilogue {
    None,
    Relu,
    /// The one that is made with tanh.
    Gelu,
}

/// A matrix of `rows` times `columns` elements, or many of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductOperand {
    /// Whether elements of a column lie side by side, and not those of a row.
    pub is_by_columns: bool,
    /// From a row to the next, or from a column to the next, in elements.
    pub stride: u64,
    /// From one matrix to the next.
    pub batch_stride: u64,
    /// What the address of the first is a multiple of, in bytes.
    pub alignment: u64,
}

/// A product, whose image is loaded as a module with one kernel, [`Product::ENTRY`]. It takes six addresses: left
/// operand, right operand, result, bias, residual and workspace, of which the last three may be any where there is
/// none. The result is the epilogue of the sums with the residual and the bias. Whoever launches it vouches for the
/// sizes: as for any kernel, only the beginnings of buffers are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product {
    pub element: ProductElement,
    pub rows: u64,
    pub columns: u64,
    /// Columns of the left operand and rows of the right one.
    pub depth: u64,
    pub batches: u64,
    pub left: ProductOperand,
    pub right: ProductOperand,
    /// Whether a number for each column is added.
    pub has_bias: bool,
    /// Whether a matrix that lies as the result does is added, from a multiple of [`Product::ADDED_ALIGNMENT`] on.
    pub has_residual: bool,
    pub epilogue: ProductEpilogue,
    /// Bytes that there are at the workspace's address.
    pub workspace_bytes: u64,
}

/// No text of a module, and no ELF file, begins so.
const MAGIC: [u8; 8] = *b"\0product";

const WORDS: usize = 17;

impl Product {
    /// The name of its kernel.
    pub const ENTRY: &str = "product";

    /// Its parameters: six addresses.
    pub const PARAMS: [(u32, u32); 6] = [(0, 8), (8, 8), (16, 8), (24, 8), (32, 8), (40, 8)];

    /// What the addresses of a bias and of a residual are multiples of, in bytes: the most that is read at once.
    pub const ADDED_ALIGNMENT: u32 = 16;

    pub fn is_image(image: &[u8]) -> bool {
        image.starts_with(&MAGIC)
    }

    /// What a module is loaded from.
    pub fn to_image(&self) -> Vec<u8> {
        let operand = |operand: &ProductOperand| {
            [u64::from(operand.is_by_columns), operand.stride, operand.batch_stride, operand.alignment]
        };
        let words: [&[u64]; 5] = [
            &[self.element as u64, self.rows, self.columns, self.depth, self.batches],
            &[u64::from(self.has_bias), u64::from(self.has_residual), self.epilogue as u64],
            &[self.workspace_bytes],
            &operand(&self.left),
            &operand(&self.right),
        ];
        MAGIC.into_iter().chain(words.concat().into_iter().flat_map(u64::to_le_bytes)).collect()
    }

    /// Reads an image; `None` if it is none, or if matrices overlap themselves or are empty.
    pub fn from_image(image: &[u8]) -> Option<Product> {
        let bytes = image.strip_prefix(&MAGIC).filter(|bytes| bytes.len() == WORDS * 8)?;
        let mut words = bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        let mut next = || words.next().unwrap_or(0);
        let element = match next() {
            0 => ProductElement::F16,
            1 => ProductElement::BF16,
            2 => ProductElement::F32,
            3 => ProductElement::Tf32,
            4 => ProductElement::F64,
            _ => return None,
        };
        let [rows, columns, depth, batches] = [next(), next(), next(), next()];
        let (has_bias, has_residual) = (flag(next())?, flag(next())?);
        let epilogue = match next() {
            0 => ProductEpilogue::None,
            1 => ProductEpilogue::Relu,
            2 => ProductEpilogue::Gelu,
            _ => return None,
        };
        let workspace_bytes = next();
        let mut operand = || {
            let is_by_columns = flag(next())?;
            Some(ProductOperand { is_by_columns, stride: next(), batch_stride: next(), alignment: next() })
        };
        let (left, right) = (operand()?, operand()?);
        let read = Product {
            element,
            rows,
            columns,
            depth,
            batches,
            left,
            right,
            has_bias,
            has_residual,
            epilogue,
            workspace_bytes,
        };
        read.is_sound().then_some(read)
    }

    /// Whether there is something to multiply, in matrices whose rows do not overlap, and sizes that a library can
    /// count.
    fn is_sound(&self) -> bool {
        let sizes = [self.rows, self.columns, self.depth, self.batches];
        let fits = |operand: &ProductOperand, rows: u64, columns: u64| {
            let least = if operand.is_by_columns { rows } else { columns };
            let is_countable = i32::try_from(operand.stride).is_ok() && i64::try_from(operand.batch_stride).is_ok();
            operand.stride >= least && is_countable && operand.alignment.is_power_of_two()
        };
        sizes.iter().all(|size| *size > 0 && i32::try_from(*size).is_ok())
            && fits(&self.left, self.rows, self.depth)
            && fits(&self.right, self.depth, self.columns)
    }
}

fn flag(word: u64) -> Option<bool> {
    match word {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product() -> Product {
        let left = ProductOperand { is_by_columns: false, stride: 7, batch_stride: 35, alignment: 16 };
        let right = ProductOperand { is_by_columns: true, stride: 9, batch_stride: 0, alignment: 4 };
        Product {
            element: ProductElement::BF16,
            rows: 5,
            columns: 3,
            depth: 7,
            batches: 2,
            left,
            right,
            has_bias: true,
            has_residual: true,
            epilogue: ProductEpilogue::Gelu,
            workspace_bytes: 1 << 25,
        }
    }

    #[test]
    fn an_image_says_what_is_multiplied() {
        let image = product().to_image();
        assert!(Product::is_image(&image));
        assert_eq!(Product::from_image(&image), Some(product()));
        assert!((0..image.len()).all(|len| Product::from_image(&image[..len]).is_none()), "cut off");
        assert!(!Product::is_image(b".version 8.0") && !Product::is_image(b"\x7fELF"));
    }

    #[test]
    fn what_cannot_be_multiplied_is_no_image() {
        let with = |change: fn(&mut Product)| {
            let mut changed = product();
            change(&mut changed);
            Product::from_image(&changed.to_image())
        };
        assert_eq!(with(|p| p.depth = 0), None);
        assert_eq!(with(|p| p.rows = 1 << 31), None);
        assert_eq!(with(|p| p.left.stride = 6), None, "rows that overlap");
        assert_eq!(with(|p| p.right.stride = 6), None, "columns that overlap");
        assert_eq!(with(|p| p.left.alignment = 3), None);
        assert!(with(|p| p.epilogue = ProductEpilogue::Relu).is_some());
        for at in 0..WORDS {
            let mut image = product().to_image();
            image[8 + at * 8 + 7] = 0xff;
            let is_free = [8, 11, 15].contains(&at);
            assert!(Product::from_image(&image).is_none() || is_free, "word {at}");
        }
    }
}

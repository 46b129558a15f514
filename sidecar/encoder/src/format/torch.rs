//! The archive of `torch.save`: a zip of stored entries, in the least form that `torch.load(weights_only=True)` of PyTorch 2.13 takes:
//! `data.pkl`, the raw elements, and the version without which torch refuses.

use super::FormatError;
use super::pickle::{self, Pickle};
use crate::tensor::DType;

/// A tensor's archive but for its raw elements, which go between `head` and `tail`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Archive {
    pub head: Vec<u8>,
    pub tail: Vec<u8>,
}

/// Zip's sizes are u32; directory and pickle need far less than this margin.
const DATA_MAX: usize = u32::MAX as usize - 4096;

/// Archive of a row-major matrix with the raw elements `data`, which are read once for the checksum.
///
/// # Errors
/// When it would need more than 4 GiB.
pub fn archive(shape: [u32; 2], dtype: DType, data: &[u8]) -> Result<Archive, FormatError> {
    let class = match dtype {
        DType::F32 => "FloatStorage",
        DType::F16 => "HalfStorage",
        DType::Bf16 => "BFloat16Storage",
    };
    write(&shape, class, data)
}

/// Whole archive of an int64 vector, such as a grid.
///
/// # Errors
/// When it would need more than 4 GiB.
pub fn int64(values: &[i64]) -> Result<Vec<u8>, FormatError> {
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let length = u32::try_from(values.len()).unwrap_or(u32::MAX);
    let Archive { head, tail } = write(&[length], "LongStorage", &data)?;
    Ok([head, data, tail].concat())
}

fn write(shape: &[u32], storage: &str, data: &[u8]) -> Result<Archive, FormatError> {
    if data.len() > DATA_MAX {
        return Err(FormatError::TooLarge { format: "a torch archive", bytes: data.len(), max: DATA_MAX });
    }
    let pickled = data_pkl(shape, storage);
    let mut zip = Zip { directory: Vec::new(), entries: 0, offset: 0 };
    let mut head = zip.entry("archive/data.pkl", &pickled);
    head.extend_from_slice(&pickled);
    head.extend(zip.entry("archive/data/0", data));
    let mut tail = zip.entry("archive/version", b"3\n");
    tail.extend_from_slice(b"3\n");
    zip.end(&mut tail);
    Ok(Archive { head, tail })
}

/// `_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())`.
fn data_pkl(shape: &[u32], storage: &str) -> Vec<u8> {
    let mut strides = vec![1_u64; shape.len()];
    let mut elements = 1_u64;
    for (stride, &side) in strides.iter_mut().zip(shape).rev() {
        *stride = elements;
        elements = elements.saturating_mul(side.into());
    }
    let mut out = Pickle::new();
    out.global("torch._utils", "_rebuild_tensor_v2").op(pickle::MARK);
    out.op(pickle::MARK).text("storage").global("torch", storage).text("0").text("cpu");
    out.integer(elements).op(pickle::TUPLE).op(pickle::BINPERSID).integer(0);
    out.op(pickle::MARK);
    for &side in shape {
        out.integer(side.into());
    }
    out.op(pickle::TUPLE).op(pickle::MARK);
    for &stride in &strides {
        out.integer(stride);
    }
    out.op(pickle::TUPLE).op(pickle::NEWFALSE).global("collections", "OrderedDict");
    out.op(pickle::EMPTY_TUPLE).op(pickle::REDUCE).op(pickle::TUPLE).op(pickle::REDUCE);
    out.stop()
}

/// Zip with stored entries: sizes in the local headers, no extra field, dated 1980-01-01.
struct Zip {
    directory: Vec<u8>,
    entries: u16,
    offset: usize,
}

const DATE_1980: u16 = 0x21;

impl Zip {
    /// Local header of an entry, to be followed by its data.
    fn entry(&mut self, name: &str, data: &[u8]) -> Vec<u8> {
        let (crc, size) = (crc32fast::hash(data), data.len() as u32);
        let mut local = Vec::with_capacity(30 + name.len() + 256);
        local.extend_from_slice(b"PK\x03\x04");
        // Version needed, flags, method (stored) and time.
        local.extend_from_slice(&[0; 8]);
        local.extend_from_slice(&DATE_1980.to_le_bytes());
        [crc, size, size].iter().for_each(|value| local.extend_from_slice(&value.to_le_bytes()));
        local.extend_from_slice(&(name.len() as u16).to_le_bytes());
        local.extend_from_slice(&[0; 2]);
        let central = &mut self.directory;
        central.extend_from_slice(b"PK\x01\x02\0\0");
        central.extend_from_slice(&local[4..30]);
        // Comment length, disk, attributes.
        central.extend_from_slice(&[0; 10]);
        central.extend_from_slice(&(self.offset as u32).to_le_bytes());
        central.extend_from_slice(name.as_bytes());
        local.extend_from_slice(name.as_bytes());
        self.offset += local.len() + data.len();
        self.entries += 1;
        local
    }

    /// Central directory and its end record.
    fn end(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.directory);
        out.extend_from_slice(b"PK\x05\x06\0\0\0\0");
        out.extend_from_slice(&self.entries.to_le_bytes());
        out.extend_from_slice(&self.entries.to_le_bytes());
        out.extend_from_slice(&(self.directory.len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.offset as u32).to_le_bytes());
        out.extend_from_slice(&[0; 2]);
    }
}

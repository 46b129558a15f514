//! A cursor over msgpack bytes: reads one head at a time and builds no tree.

use rmp::Marker;

use crate::event::DecodeError;

/// The start of one value. Scalars and strings are whole; the items of a container follow it.
#[derive(Debug)]
pub(crate) enum Head<'a> {
    Nil,
    Unsigned(u64),
    Negative(i64),
    Str(&'a [u8]),
    Bin(&'a [u8]),
    /// Items; never more than bytes are left.
    Array(usize),
    /// Pairs; never more than half the bytes left.
    Map(usize),
    /// Boolean, float or extension: nothing here reads one.
    Other,
}

/// Position in a payload. Copying it remembers a place to come back to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.at == self.bytes.len()
    }

    pub(crate) fn wanted(&self, wanted: &'static str) -> DecodeError {
        DecodeError::Layout { at: self.at, wanted }
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], DecodeError> {
        if len > self.left() {
            return Err(DecodeError::Truncated { at: self.bytes.len() });
        }
        let taken = &self.bytes[self.at..self.at + len];
        self.at += len;
        Ok(taken)
    }

    /// `width` ≤ 8 bytes, big-endian.
    fn number(&mut self, width: usize) -> Result<u64, DecodeError> {
        Ok(self.take(width)?.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn sized(&mut self, width: usize) -> Result<&'a [u8], DecodeError> {
        let len = self.number(width)?;
        self.take(usize::try_from(len).unwrap_or(usize::MAX))
    }

    /// Container length; one that the rest of the payload cannot hold is refused here, before anyone allocates by it.
    fn items(&self, count: u64, bytes_each: usize) -> Result<usize, DecodeError> {
        usize::try_from(count)
            .ok()
            .filter(|count| count.saturating_mul(bytes_each) <= self.left())
            .ok_or(DecodeError::Truncated { at: self.bytes.len() })
    }

    fn signed(&mut self, width: usize) -> Result<Head<'a>, DecodeError> {
        let shift = 64 - 8 * width as u32;
        let value = (self.number(width)? << shift).cast_signed() >> shift;
        Ok(u64::try_from(value).map_or(Head::Negative(value), Head::Unsigned))
    }

    fn other(&mut self, len: usize) -> Result<Head<'a>, DecodeError> {
        self.take(len)?;
        Ok(Head::Other)
    }

    fn array_head(&self, count: u64) -> Result<Head<'a>, DecodeError> {
        self.items(count, 1).map(Head::Array)
    }

    fn map_head(&self, count: u64) -> Result<Head<'a>, DecodeError> {
        self.items(count, 2).map(Head::Map)
    }

    pub(crate) fn head(&mut self) -> Result<Head<'a>, DecodeError> {
        let at = self.at;
        Ok(match Marker::from_u8(self.take(1)?[0]) {
            Marker::Null => Head::Nil,
            Marker::True | Marker::False => Head::Other,
            Marker::FixPos(value) => Head::Unsigned(u64::from(value)),
            Marker::FixNeg(value) => Head::Negative(i64::from(value)),
            Marker::U8 => Head::Unsigned(self.number(1)?),
            Marker::U16 => Head::Unsigned(self.number(2)?),
            Marker::U32 => Head::Unsigned(self.number(4)?),
            Marker::U64 => Head::Unsigned(self.number(8)?),
            Marker::I8 => self.signed(1)?,
            Marker::I16 => self.signed(2)?,
            Marker::I32 => self.signed(4)?,
            Marker::I64 => self.signed(8)?,
            Marker::FixStr(len) => Head::Str(self.take(usize::from(len))?),
            Marker::Str8 => Head::Str(self.sized(1)?),
            Marker::Str16 => Head::Str(self.sized(2)?),
            Marker::Str32 => Head::Str(self.sized(4)?),
            Marker::Bin8 => Head::Bin(self.sized(1)?),
            Marker::Bin16 => Head::Bin(self.sized(2)?),
            Marker::Bin32 => Head::Bin(self.sized(4)?),
            Marker::FixArray(count) => self.array_head(u64::from(count))?,
            Marker::Array16 => self.number(2).and_then(|count| self.array_head(count))?,
            Marker::Array32 => self.number(4).and_then(|count| self.array_head(count))?,
            Marker::FixMap(count) => self.map_head(u64::from(count))?,
            Marker::Map16 => self.number(2).and_then(|count| self.map_head(count))?,
            Marker::Map32 => self.number(4).and_then(|count| self.map_head(count))?,
            Marker::F32 => self.other(4)?,
            Marker::F64 => self.other(8)?,
            // An extension has a type byte besides its data.
            Marker::FixExt1 => self.other(2)?,
            Marker::FixExt2 => self.other(3)?,
            Marker::FixExt4 => self.other(5)?,
            Marker::FixExt8 => self.other(9)?,
            Marker::FixExt16 => self.other(17)?,
            Marker::Ext8 => self.number(1).and_then(|len| self.extension(len))?,
            Marker::Ext16 => self.number(2).and_then(|len| self.extension(len))?,
            Marker::Ext32 => self.number(4).and_then(|len| self.extension(len))?,
            Marker::Reserved => return Err(DecodeError::NotMsgpack { at }),
        })
    }

    fn extension(&mut self, len: u64) -> Result<Head<'a>, DecodeError> {
        self.other(usize::try_from(len).unwrap_or(usize::MAX).saturating_add(1))
    }

    /// Passes over one value of any depth: values still to come are counted, not stacked.
    pub(crate) fn skip(&mut self) -> Result<(), DecodeError> {
        let mut pending = 1_usize;
        while pending > 0 {
            pending -= 1;
            pending += match self.head()? {
                Head::Array(items) => items,
                Head::Map(pairs) => 2 * pairs,
                _ => 0,
            };
            if pending > self.left() {
                return Err(DecodeError::Truncated { at: self.bytes.len() });
            }
        }
        Ok(())
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, DecodeError> {
        self.optional_text()?.ok_or_else(|| self.wanted("string"))
    }

    pub(crate) fn optional_text(&mut self) -> Result<Option<&'a str>, DecodeError> {
        let start = *self;
        match self.head()? {
            Head::Nil => Ok(None),
            Head::Str(bytes) => std::str::from_utf8(bytes).map(Some).map_err(|_| start.wanted("UTF-8 string")),
            _ => Err(start.wanted("string or nil")),
        }
    }

    pub(crate) fn optional_u32(&mut self) -> Result<Option<u32>, DecodeError> {
        let start = *self;
        match self.head()? {
            Head::Nil => Ok(None),
            Head::Unsigned(value) => u32::try_from(value).map(Some).map_err(|_| start.wanted("number below 2^32")),
            _ => Err(start.wanted("number or nil")),
        }
    }

    /// Length of the array that starts here.
    pub(crate) fn array(&mut self) -> Result<usize, DecodeError> {
        let start = *self;
        match self.head()? {
            Head::Array(items) => Ok(items),
            _ => Err(start.wanted("array")),
        }
    }
}

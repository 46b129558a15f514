//! Time tables and edit lists of a track.

use super::super::bytes::{be16, be32, be64};
use super::{FULL, child};

/// Most samples that are looked at one by one, under an edit list: nine hours at 30 frames per second.
const WALK_MAX: u64 = 1 << 20;

/// Decoding times (`stts`), and what shifts them to times of showing (`ctts`).
pub(super) struct Times<'a> {
    /// Pairs of a number of samples and the time each lasts.
    lasting: &'a [u8],
    /// Pairs of a number of samples and the shift of each.
    shifts: Option<&'a [u8]>,
    pub samples: u64,
    /// Time that all of them last.
    pub units: u64,
}

/// What a track's edit list does.
#[derive(Clone, Copy)]
pub(super) enum Edit {
    /// There is none.
    Absent,
    /// Time is shown from `start` to `end`, in units of the track.
    Between { start: i64, end: i64 },
    /// Several edits, a pause or another speed.
    Complex,
}

/// Pairs of 32-bit numbers; the count in front of them is believed only as far as the bytes go.
fn pairs(table: &[u8]) -> impl Iterator<Item = (u32, u32)> {
    let count = be32(table, FULL).unwrap_or(0);
    let entries = table.get(FULL + 4..).unwrap_or_default().chunks_exact(8);
    let pair = |entry: &[u8]| Some((be32(entry, 0)?, be32(entry, 4)?));
    entries.take(count as usize).filter_map(pair)
}

impl<'a> Times<'a> {
    /// `None` when there is no table, or another says how many samples there are.
    pub fn read(tables: &'a [u8]) -> Option<Self> {
        let lasting = child(tables, b"stts")?;
        let (mut samples, mut units) = (0_u64, 0_u64);
        for (count, delta) in pairs(lasting) {
            samples += u64::from(count);
            units = units.checked_add(u64::from(count) * u64::from(delta))?;
        }
        let sizes = child(tables, b"stsz").or_else(|| child(tables, b"stz2"));
        let sized = sizes.and_then(|sizes| be32(sizes, FULL + 4));
        let agreed = sized.is_none_or(|sized| u64::from(sized) == samples);
        agreed.then(|| Self { lasting, shifts: child(tables, b"ctts"), samples, units })
    }

    /// Samples that are shown. vLLM takes the count of all when at most one is hidden.
    pub fn shown(&self, edit: Edit) -> Option<u32> {
        let shown = match edit {
            Edit::Absent => self.samples,
            Edit::Complex => return None,
            Edit::Between { start, end } => self.between(start, end)?,
        };
        let counted = if self.samples - shown <= 1 { self.samples } else { shown };
        u32::try_from(counted).ok().filter(|_| shown > 0)
    }

    /// Samples shown from `start` on, before `end`. `None` when there are too many to look at.
    fn between(&self, start: i64, end: i64) -> Option<u64> {
        if self.samples > WALK_MAX {
            return None;
        }
        let repeat = |(count, value): (u32, u32)| std::iter::repeat_n(value, count as usize);
        let mut shifts = self.shifts.into_iter().flat_map(pairs).flat_map(repeat);
        let (mut time, mut shown) = (0_i64, 0);
        for delta in pairs(self.lasting).flat_map(repeat) {
            let at = time.checked_add(shifts.next().unwrap_or(0).cast_signed().into())?;
            shown += u64::from((start..end).contains(&at));
            time = time.checked_add(delta.into())?;
        }
        Some(shown)
    }
}

impl Edit {
    /// `movie_units` and `units` per second: those of the movie, in which lengths are, and of the track.
    pub fn read(list: Option<&[u8]>, movie_units: u32, units: u32) -> Self {
        let Some(list) = list else { return Self::Absent };
        match be32(list, FULL) {
            Some(0) => Self::Absent,
            Some(1) => Self::single(list, movie_units, units).unwrap_or(Self::Complex),
            _ => Self::Complex,
        }
    }

    fn single(list: &[u8], movie_units: u32, units: u32) -> Option<Self> {
        let at = FULL + 4;
        let (length, start, speed) = match list.first()? {
            0 => (be32(list, at)?.into(), i64::from(be32(list, at + 4)?.cast_signed()), at + 8),
            _ => (be64(list, at)?, be64(list, at + 8)?.cast_signed(), at + 16),
        };
        if be16(list, speed)? != 1 || movie_units == 0 {
            return None;
        }
        // Rounded to the nearest, as FFmpeg does. A negative start is a pause; nothing is shown of a length of 0.
        let movie_units = u128::from(movie_units);
        let length = (u128::from(length) * u128::from(units) + movie_units / 2) / movie_units;
        let length = i64::try_from(length).ok().filter(|&length| length > 0 && start >= 0)?;
        Some(Self::Between { start, end: start.checked_add(length)? })
    }
}

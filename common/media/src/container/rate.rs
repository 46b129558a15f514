//! Frame rates as FFmpeg keeps them: a fraction in lowest terms, or the nearest with small numbers.

/// Frames per second, `numerator / denominator`; both at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    numerator: u32,
    denominator: u32,
}

/// Greatest number in a rate of an MP4 file (`INT_MAX` in FFmpeg's `mov.c`).
const NUMBER_MAX: u64 = i32::MAX as u64;

impl Rate {
    /// `None` for zero, or unless both numbers fit when reduced.
    pub fn new(numerator: u64, denominator: u64) -> Option<Self> {
        Self::nearest(numerator, denominator, NUMBER_MAX)
    }

    /// The fraction nearest to `numerator / denominator` whose numbers are at most `max`, by continued fractions.
    pub(super) fn nearest(numerator: u64, denominator: u64, max: u64) -> Option<Self> {
        let (max, mut rest) = (u128::from(max), (u128::from(numerator), u128::from(denominator)));
        let (mut before, mut last) = ((0_u128, 1_u128), (1_u128, 0_u128));
        while rest.1 > 0 {
            let whole = rest.0 / rest.1;
            let next = (whole * last.0 + before.0, whole * last.1 + before.1);
            if next.0 > max || next.1 > max {
                // The longest step that still fits; taken when it is nearer than none.
                let fits = |limit: u128, step: u128| limit.checked_div(step).unwrap_or(whole);
                let step = fits(max.saturating_sub(before.0), last.0).min(fits(max.saturating_sub(before.1), last.1));
                if rest.1 * (2 * step * last.1 + before.1) > rest.0 * last.1 {
                    last = (step * last.0 + before.0, step * last.1 + before.1);
                }
                break;
            }
            (before, last) = (last, next);
            rest = (rest.1, rest.0 - rest.1 * whole);
        }
        let side = |value: u128| u32::try_from(value).ok().filter(|&value| value > 0);
        Some(Self { numerator: side(last.0)?, denominator: side(last.1)? })
    }

    pub fn numerator(self) -> u32 {
        self.numerator
    }

    pub fn denominator(self) -> u32 {
        self.denominator
    }

    /// As OpenCV hands it on.
    pub fn per_second(self) -> f64 {
        f64::from(self.numerator) / f64::from(self.denominator)
    }
}

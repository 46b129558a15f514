//! Metric labels from enums: the metrics crate writes variant names as they stand, our labels are snake_case.

use std::fmt::{self, Debug, Write};

use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};

/// Makes field-less enums that derive `Debug` label values in snake_case: `LoadOnly` → `load_only`.
///
/// ```
/// #[derive(Clone, Debug, PartialEq, Eq, Hash)]
/// pub enum Outcome { LoadOnly }
/// fovea_service::snake_case_labels!(Outcome);
/// ```
#[macro_export]
macro_rules! snake_case_labels {
    ($($label:ty),+ $(,)?) => { $(
        impl $crate::label::reexport::EncodeLabelValue for $label {
            fn encode(&self, encoder: &mut $crate::label::reexport::LabelValueEncoder) -> ::std::fmt::Result {
                $crate::label::write_snake_case(self, encoder)
            }
        }
    )+ };
}

/// The same for an enum of another crate: `Family<Labels, Counter>` with a field `cause: Snake<Skipped>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Snake<T>(pub T);

impl<T: Debug> EncodeLabelValue for Snake<T> {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> fmt::Result {
        write_snake_case(&self.0, encoder)
    }
}

/// Writes the `Debug` name of a field-less variant in snake_case.
///
/// # Errors
/// Only those of `out`.
pub fn write_snake_case(value: &impl Debug, out: &mut impl Write) -> fmt::Result {
    struct Snaking<'a, W>(&'a mut W, bool);
    impl<W: Write> Write for Snaking<'_, W> {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            for c in text.chars() {
                if c.is_ascii_uppercase() && self.1 {
                    self.0.write_char('_')?;
                }
                self.1 = true;
                self.0.write_char(c.to_ascii_lowercase())?;
            }
            Ok(())
        }
    }
    write!(Snaking(out, false), "{value:?}")
}

/// For the macro only.
#[doc(hidden)]
pub mod reexport {
    pub use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::{EncodeLabelSet, text};
    use prometheus_client::metrics::{counter::Counter, family::Family};
    use prometheus_client::registry::Registry;

    use super::*;

    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    enum Outcome {
        LoadOnly,
    }
    snake_case_labels!(Outcome);

    #[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
    struct Labels {
        outcome: Outcome,
        other: Snake<Option<()>>,
    }

    #[test]
    fn variants_encode_in_snake_case() {
        let family = Family::<Labels, Counter>::default();
        family.get_or_create(&Labels { outcome: Outcome::LoadOnly, other: Snake(None) }).inc();
        let mut registry = Registry::default();
        registry.register("decisions", "Decisions", family);
        let mut page = String::new();
        text::encode(&mut page, &registry).unwrap();
        assert!(page.contains(r#"decisions_total{outcome="load_only",other="none"} 1"#), "{page}");
    }
}

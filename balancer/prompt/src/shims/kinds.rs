//! The tests `iterable` and `sequence` as Python answers them: null is neither, texts and mappings are both.

use minijinja::value::{Value, ValueKind};

pub(super) fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || matches!(value.kind(), ValueKind::Iterable | ValueKind::Undefined)
}

pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Bytes | ValueKind::Seq | ValueKind::Map)
}

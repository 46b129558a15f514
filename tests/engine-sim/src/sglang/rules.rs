//! What changed between SGLang's releases, of what shows outside.

/// A release; what follows the third number (`.post1`, `rc1`) is passed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

impl Version {
    /// `0.5.23`, `0.5.9.post1`; `None` when there are no three numbers.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim_start_matches('v').splitn(3, '.');
        let mut number = || {
            let part = parts.next()?;
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            part[..digits].parse().ok()
        };
        Some(Self(number()?, number()?, number()?))
    }
}

/// How removed pages are grouped into `BlockRemoved`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Up to 0.5.14.
    PerPage,
    /// 0.5.15 to 0.5.17.
    PerNode,
    /// From 0.5.18: consecutive ones of a step.
    Merged,
}

/// The rules of one release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Events are maps (0.5.20), else arrays.
    pub maps: bool,
    /// Consecutive stores of a step are one event (0.5.18), else each page has its own.
    pub coalesced: bool,
    /// Grouping of removals.
    pub removal: Removal,
    /// `cache_salt` enters the digests and shows in events (0.5.18), else it is joined into `extra_key`.
    pub salts: bool,
    /// `session_id` shows in events (0.5.20).
    pub sessions: bool,
    /// A media item has four pads of 62 bits (0.5.23), else one of 30.
    pub wide_pads: bool,
    /// Replies to a replay carry the topic (0.5.22).
    pub replay_topic: bool,
}

impl Rules {
    /// Those of a release.
    pub fn of(version: Version) -> Self {
        let since = |patch| version >= Version(0, 5, patch);
        let removal = match (since(15), since(18)) {
            (_, true) => Removal::Merged,
            (true, false) => Removal::PerNode,
            (false, false) => Removal::PerPage,
        };
        Self {
            maps: since(20),
            coalesced: since(18),
            removal,
            salts: since(18),
            sessions: since(20),
            wide_pads: since(23),
            replay_topic: since(22),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_with_and_without_a_suffix() {
        for (text, expect) in [
            ("0.5.23", Some(Version(0, 5, 23))),
            ("v0.5.9.post1", Some(Version(0, 5, 9))),
            ("0.5.20rc1", Some(Version(0, 5, 20))),
            ("0.5", None),
            ("main", None),
        ] {
            assert_eq!(Version::parse(text), expect, "{text}");
        }
    }

    #[test]
    fn each_rule_begins_with_its_release() {
        let rules = |patch| Rules::of(Version(0, 5, patch));
        assert_eq!((rules(14).removal, rules(17).removal), (Removal::PerPage, Removal::PerNode));
        assert!(!rules(17).coalesced && rules(18).coalesced && rules(18).salts);
        assert!(!rules(19).maps && rules(20).maps && rules(20).sessions);
        assert!(!rules(21).replay_topic && rules(22).replay_topic);
        assert!(!rules(22).wide_pads && rules(23).wide_pads);
    }
}

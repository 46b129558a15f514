//! Release numbers of engines: `0.5.20`, `0.5.20.post1`, `v1.3.0rc27`, `0.32.1.dev3+g1a2b3c4`.

/// The first three numbers of a version; what follows them, and what cannot be read, is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

impl Version {
    /// `None` without at least two numbers.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().trim_start_matches('v').split('.').map(|part| {
            let digits = part.len() - part.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            part[..digits].parse::<u32>().ok()
        });
        let (major, minor) = (parts.next()??, parts.next()??);
        Some(Self(major, minor, parts.next().flatten().unwrap_or(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_all_engines_are_read() {
        for (text, expect) in [
            ("0.5.20", Some(Version(0, 5, 20))),
            ("0.5.20.post1", Some(Version(0, 5, 20))),
            ("v1.3.0rc27", Some(Version(1, 3, 0))),
            ("0.32", Some(Version(0, 32, 0))),
            ("0.33.0+cpu", Some(Version(0, 33, 0))),
            ("main", None),
            ("", None),
            ("1", None),
            ("1.x.2", None),
        ] {
            assert_eq!(Version::parse(text), expect, "{text}");
        }
        assert!(Version(0, 5, 9) < Version(0, 5, 20));
    }
}

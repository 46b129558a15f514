//! Which engine paths are passed on, and what passing them means.

/// Paths that clients need. Everything else is refused: vLLM's development end points empty caches, put the engine to sleep or run
/// code in it.
const BUILT_IN: &[&str] = &[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/health",
    "/ping",
    "/tokenize",
    "/detokenize",
    "/version",
];

/// Paths that balancers need besides: processing an image for nothing is no service to clients.
const FOR_BALANCERS: &[&str] = &["/v1/chat/completions/render"];

/// Bodies in which a client could set an identity or a report mode.
const SCANNED: &[&str] = &["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize"];

/// Paths whose requests make the engine compute.
const COMPUTING: &[&str] = &["/v1/chat/completions", "/v1/completions", "/v1/embeddings"];

#[derive(Clone, Debug, Default)]
pub struct Paths {
    allowed: Vec<String>,
}

impl Paths {
    /// The built-in paths and these. Exact match, before any decoding of `%`.
    pub fn new(allowed: &[String]) -> Self {
        Self { allowed: allowed.to_vec() }
    }

    pub fn allows(&self, path: &str) -> bool {
        BUILT_IN.contains(&path) || self.allowed.iter().any(|allowed| allowed == path)
    }
}

pub fn is_for_balancers(path: &str) -> bool {
    FOR_BALANCERS.contains(&path)
}

pub fn is_scanned(path: &str) -> bool {
    SCANNED.contains(&path)
}

/// Bodies whose images an encoder takes, where there is one.
pub fn is_encoded(path: &str) -> bool {
    path == "/v1/chat/completions"
}

pub fn is_computing(path: &str) -> bool {
    COMPUTING.contains(&path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_paths_pass_and_only_as_they_stand() {
        let paths = Paths::new(&["/sleep".into()]);
        for (path, passes) in [
            ("/v1/chat/completions", true),
            ("/sleep", true),
            ("/reset_prefix_cache", false),
            ("/collective_rpc", false),
            ("/v1/chat/completions/", false),
            ("/v1//models", false),
            ("/v1/models/../../sleep", false),
            ("/%73leep", false),
            ("/metrics", false),
            ("/v1/chat/completions/render", false),
            ("*", false),
            ("", false),
        ] {
            assert_eq!(paths.allows(path), passes, "{path}");
        }
    }
}

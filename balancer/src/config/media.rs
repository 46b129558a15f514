//! `media:` what the balancer fetches for clients, from where, and within which bounds.

use std::path::PathBuf;
use std::time::Duration;

use fovea_service::config::{ByteSize, Invalid, Validate, human_duration};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MediaConfig {
    /// Fetch http(s) media at all; without it their URLs are left to the engine.
    pub enabled: bool,
    /// What names the image behind a URL.
    pub identity: IdentityPolicy,
    /// Pass a file on inline that was fetched whole, so that the engine sees the bytes that were identified; otherwise it fetches the URL itself.
    pub inline: bool,
    pub schemes: Vec<Scheme>,
    /// Ports that may be dialled; empty = every port.
    pub ports: Vec<u16>,
    /// Networks open although they are refused by default. The most specific entry of all lists decides.
    pub allow: Vec<IpNet>,
    /// Networks closed although they are public; wins over `allow` at equal length.
    pub deny: Vec<IpNet>,
    /// PEM certificates trusted besides those of the system.
    pub ca_file: Option<PathBuf>,
    /// Largest file.
    pub body_max: ByteSize,
    /// Most pixels by an image's header, width times height.
    pub pixels_max: u64,
    /// From the start of a fetch to its end, all redirects and waits together.
    #[serde(with = "human_duration")]
    pub timeout: Duration,
    pub redirects_max: u8,
    /// Exchanges at a time with one host.
    pub per_host_max: usize,
    /// Exchanges at a time with all hosts.
    pub fetches_max: usize,
    /// Fetched bytes in memory, cached ones included.
    pub bytes_max: ByteSize,
    /// Fetched bytes kept for the next request.
    pub cache_max: ByteSize,
    /// A kept file is used this long without asking its origin again, and no longer than the origin allows.
    #[serde(with = "human_duration")]
    pub fresh_for: Duration,
    /// What becomes of videos whose rule no engine was seen to follow.
    pub unmeasured_videos: UnmeasuredVideos,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnmeasuredVideos {
    /// They end the view.
    Prefix,
    /// The rule is believed.
    Predict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum IdentityPolicy {
    /// The bytes: fetched whole, predicted exactly.
    Content,
    /// Host, path, strong `ETag` and length: only the image's header is fetched.
    Validator,
    /// The URL as written: only the image's header is fetched.
    Url,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    Http,
    Https,
}

impl Default for MediaConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            identity: IdentityPolicy::Content,
            inline: true,
            schemes: vec![Scheme::Http, Scheme::Https],
            ports: vec![80, 443],
            allow: Vec::new(),
            deny: Vec::new(),
            ca_file: None,
            body_max: ByteSize::mib(20),
            pixels_max: 64_000_000,
            timeout: Duration::from_secs(5),
            redirects_max: 3,
            per_host_max: 16,
            fetches_max: 256,
            bytes_max: ByteSize::mib(256),
            cache_max: ByteSize::mib(64),
            fresh_for: Duration::ZERO,
            unmeasured_videos: UnmeasuredVideos::Prefix,
        }
    }
}

impl Validate for MediaConfig {
    fn validate(&self) -> Result<(), Invalid> {
        let positive = [
            ("pixels_max", self.pixels_max == 0),
            ("per_host_max", self.per_host_max == 0),
            ("fetches_max", self.fetches_max == 0),
            ("timeout", self.timeout.is_zero()),
        ];
        if let Some((field, _)) = positive.into_iter().find(|(_, is_zero)| *is_zero) {
            return Err(Invalid::new(field, "is 0", "write more than 0, or leave it out"));
        }
        let most = [("per_host_max", self.per_host_max), ("fetches_max", self.fetches_max)];
        if let Some((field, _)) = most.into_iter().find(|(_, value)| *value > 100_000) {
            return Err(Invalid::new(field, "is more than 100000", "write a number of connections such as 256"));
        }
        if self.redirects_max > 20 {
            return Err(Invalid::new("redirects_max", "is more than 20", "write 0 to 20"));
        }
        if self.schemes.is_empty() {
            return Err(Invalid::new("schemes", "is empty", "write `enabled: false` to fetch nothing"));
        }
        if self.body_max.as_u64() == 0 || self.body_max.as_u64() > 1 << 30 {
            return Err(Invalid::new("body_max", "is 0 or more than 1GiB", "write a size such as 20MiB"));
        }
        if self.bytes_max.as_u64() > 1 << 40 {
            return Err(Invalid::new("bytes_max", "is more than 1TiB", "write a size such as 256MiB"));
        }
        if self.bytes_max.as_u64() < self.cache_max.as_u64().saturating_add(self.body_max.as_u64()) {
            let remedy = "make it at least media.cache_max and media.body_max together";
            return Err(Invalid::new("bytes_max", "leaves no room beside the cache", remedy));
        }
        Ok(())
    }
}

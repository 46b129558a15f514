//! What files said last, replaced as a whole when they say something else.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use tokio_util::sync::CancellationToken;

use super::certificate;
use super::files::{Files, Material, TlsError};
use super::metrics::{LinkLabels, ReloadEnd, ReloadLabels, TlsMetrics};

/// Files are looked at this often.
pub const LOOK_EVERY: Duration = Duration::from_secs(3);
/// A certificate that ends within this is named in the log when it is loaded.
const SOON: Duration = Duration::from_secs(24 * 3600);

/// A value made of files.
pub struct Loaded<T> {
    pub value: T,
    /// Grows by one with each replacement.
    pub generation: u64,
    pub not_after: Option<i64>,
}

type Make<T> = Box<dyn Fn(&Material) -> Result<T, TlsError> + Send + Sync>;

/// The files of one link and what they made last.
pub struct Reloading<T> {
    /// Name of the link in logs and metrics.
    link: &'static str,
    files: Files,
    make: Make<T>,
    current: ArcSwap<Loaded<T>>,
    /// Digest of what was tried last; `None` = the files could not be read.
    tried: Mutex<Option<blake3::Hash>>,
    pub(super) metrics: TlsMetrics,
}

/// What a look at the files came to.
#[derive(Debug)]
pub enum Looked {
    Unchanged,
    Replaced,
    /// Told once for one content of the files.
    Failed(TlsError),
}

/// Something whose files are to be looked at.
pub trait Watched: Send + Sync {
    /// Reads the files, and takes what they say when it is new and fits together. Blocking.
    fn look(&self) -> Looked;
}

impl<T: Send + Sync + 'static> Reloading<T> {
    /// Reads the files for the first time. Blocking.
    ///
    /// # Errors
    /// When they cannot be read or do not fit together.
    pub fn load(
        link: &'static str,
        files: Files,
        metrics: &TlsMetrics,
        make: impl Fn(&Material) -> Result<T, TlsError> + Send + Sync + 'static,
    ) -> Result<Self, TlsError> {
        let texts = files.read()?;
        let material = files.parse(&texts)?;
        let loaded = Loaded { value: make(&material)?, generation: 0, not_after: material.not_after };
        let this = Self {
            link,
            files,
            make: Box::new(make),
            current: ArcSwap::from_pointee(loaded),
            tried: Mutex::new(Some(texts.digest)),
            metrics: metrics.clone(),
        };
        this.tell(&this.get());
        Ok(this)
    }

    pub fn get(&self) -> Guard<Arc<Loaded<T>>> {
        self.current.load()
    }

    pub fn link(&self) -> &'static str {
        self.link
    }

    fn tell(&self, loaded: &Loaded<T>) {
        let Some(not_after) = loaded.not_after else { return };
        self.metrics.expires.get_or_create(&LinkLabels { link: self.link }).set(not_after);
        match certificate::left(not_after) {
            None => tracing::warn!(link = self.link, "the certificate has expired; peers refuse it"),
            Some(left) if left < SOON => {
                tracing::warn!(link = self.link, hours = left.as_secs() / 3600, "the certificate expires soon");
            }
            Some(_) => {}
        }
    }

    fn attempt(&self) -> Result<bool, Option<TlsError>> {
        let mut tried = self.tried.lock().unwrap_or_else(PoisonError::into_inner);
        let texts = match self.files.read() {
            Ok(texts) => texts,
            Err(error) => return Err(tried.take().map(|_| error)),
        };
        if *tried == Some(texts.digest) {
            return Ok(false);
        }
        *tried = Some(texts.digest);
        let material = self.files.parse(&texts).map_err(Some)?;
        let value = (self.make)(&material).map_err(Some)?;
        let generation = self.get().generation + 1;
        self.current.store(Arc::new(Loaded { value, generation, not_after: material.not_after }));
        Ok(true)
    }
}

impl<T: Send + Sync + 'static> Watched for Reloading<T> {
    fn look(&self) -> Looked {
        let (end, looked) = match self.attempt() {
            Ok(false) | Err(None) => return Looked::Unchanged,
            Ok(true) => (ReloadEnd::Replaced, Looked::Replaced),
            Err(Some(error)) => (ReloadEnd::Failed, Looked::Failed(error)),
        };
        self.metrics.reloads.get_or_create(&ReloadLabels { link: self.link, end }).inc();
        match &looked {
            Looked::Failed(error) => {
                let error: &(dyn std::error::Error + 'static) = error;
                tracing::warn!(link = self.link, error, "new certificates cannot be used, the old ones stay");
            }
            _ => {
                tracing::info!(link = self.link, "certificates replaced");
                self.tell(&self.get());
            }
        }
        looked
    }
}

/// Looks at all files until the stop.
pub async fn watch(all: Vec<Arc<dyn Watched>>, every: Duration, stop: CancellationToken) {
    let mut tick = tokio::time::interval(every);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while !all.is_empty() && stop.run_until_cancelled(tick.tick()).await.is_some() {
        let all = all.clone();
        let looked = tokio::task::spawn_blocking(move || all.iter().for_each(|watched| drop(watched.look())));
        if looked.await.is_err() {
            return;
        }
    }
}

//! Places: so many exchanges with one host, so many in all, so many bytes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Unit of the byte budget.
const UNIT: u64 = 1024;

/// Counts exchanges by host. A host is known only while somebody holds or awaits a place.
pub(super) struct Hosts {
    places: Mutex<HashMap<String, Arc<Semaphore>>>,
    per_host: usize,
    all: Arc<Semaphore>,
}

/// One place, given back by drop.
pub(super) struct Place<'a> {
    hosts: &'a Hosts,
    host: &'a str,
    semaphore: Arc<Semaphore>,
    held: Option<(OwnedSemaphorePermit, OwnedSemaphorePermit)>,
}

impl Hosts {
    pub fn new(per_host: usize, all: usize) -> Self {
        Self { places: Mutex::default(), per_host, all: Arc::new(Semaphore::new(all)) }
    }

    /// Waits for a place with the host first, so that a slow host's queue takes no place from others. Cancel-safe.
    pub async fn enter<'a>(&'a self, host: &'a str) -> Place<'a> {
        let semaphore = {
            let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
            let new = || Arc::new(Semaphore::new(self.per_host));
            Arc::clone(places.entry(host.to_owned()).or_insert_with(new))
        };
        let mut place = Place { hosts: self, host, semaphore, held: None };
        let here = Arc::clone(&place.semaphore).acquire_owned().await.expect("never closed");
        let anywhere = Arc::clone(&self.all).acquire_owned().await.expect("never closed");
        place.held = Some((here, anywhere));
        place
    }

    #[cfg(test)]
    fn known(&self) -> usize {
        self.places.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.held = None;
        let mut places = self.hosts.places.lock().unwrap_or_else(PoisonError::into_inner);
        // The map and this place: no other has it, and none can take it while the map is locked.
        if Arc::strong_count(&self.semaphore) == 2 {
            places.remove(self.host);
        }
    }
}

/// Bytes that fetched files may take together.
pub(super) struct Budget(Arc<Semaphore>);

impl Budget {
    pub fn new(bytes: u64) -> Self {
        Self(Arc::new(Semaphore::new(usize::try_from(bytes / UNIT).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS))))
    }

    /// Waits until so many bytes are free. Cancel-safe.
    pub async fn take(&self, bytes: u64) -> OwnedSemaphorePermit {
        let units = u32::try_from(bytes.div_ceil(UNIT)).expect("config allows 1 GiB a file at most");
        Arc::clone(&self.0).acquire_many_owned(units).await.expect("never closed")
    }
}

/// Gives back what a file of `bytes` does not need.
pub(super) fn shrink(permit: &mut OwnedSemaphorePermit, bytes: u64) {
    let needed = usize::try_from(bytes.div_ceil(UNIT)).unwrap_or(usize::MAX);
    drop(permit.split(permit.num_permits().saturating_sub(needed)));
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn a_host_has_so_many_places_and_is_forgotten_with_the_last() {
        let hosts = Hosts::new(2, 10);
        let first = hosts.enter("a").now_or_never().unwrap();
        let second = hosts.enter("a").now_or_never().unwrap();
        assert!(hosts.enter("a").now_or_never().is_none());
        assert!(hosts.enter("b").now_or_never().is_some());
        drop(first);
        assert!(hosts.enter("a").now_or_never().is_some());
        assert_eq!(hosts.known(), 1);
        drop(second);
        assert_eq!(hosts.known(), 0);
    }

    #[test]
    fn waiting_for_one_host_takes_no_place_from_another() {
        let hosts = Hosts::new(1, 2);
        let _busy = hosts.enter("slow").now_or_never().unwrap();
        let mut waiting: Vec<_> = (0..5).map(|_| Box::pin(hosts.enter("slow"))).collect();
        assert!(waiting.iter_mut().all(|place| place.now_or_never().is_none()));
        assert!(hosts.enter("quick").now_or_never().is_some());
    }

    #[test]
    fn the_budget_gives_back_what_is_not_needed() {
        let budget = Budget::new(10 * UNIT);
        let mut permit = budget.take(10 * UNIT).now_or_never().unwrap();
        assert!(budget.take(1).now_or_never().is_none());
        shrink(&mut permit, UNIT + 1);
        assert!(budget.take(8 * UNIT).now_or_never().is_some());
        assert!(budget.take(9 * UNIT).now_or_never().is_none());
    }
}

//! Fetches under way, so that equal ones share. One ends with the last that waits for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};

use super::keep::Key;
use super::{FetchError, Fetched};

type Work = BoxFuture<'static, Result<Fetched, FetchError>>;

#[derive(Clone, Default)]
pub(super) struct Flights(Arc<Mutex<Table>>);

#[derive(Default)]
struct Table {
    under_way: HashMap<Key, (u64, WeakShared<Work>)>,
    started: u64,
}

/// Takes its fetch off the table, done or dropped.
struct Landing {
    flights: Flights,
    key: Key,
    number: u64,
}

impl Flights {
    /// The fetch of `key` that is under way (and true), or the one that `start` begins.
    pub fn join(&self, key: &Key, start: impl FnOnce() -> Work) -> (Shared<Work>, bool) {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(flight) = table.under_way.get(key).and_then(|(_, flight)| flight.upgrade()) {
            return (flight, true);
        }
        table.started += 1;
        let landing = Landing { flights: self.clone(), key: key.clone(), number: table.started };
        let work = start();
        let flight = async move {
            let _landing = landing;
            work.await
        };
        let flight = flight.boxed().shared();
        if let Some(weak) = flight.downgrade() {
            let number = table.started;
            table.under_way.insert(key.clone(), (number, weak));
        }
        (flight, false)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        let mut table = self.flights.0.lock().unwrap_or_else(PoisonError::into_inner);
        if table.under_way.get(&self.key).is_some_and(|(number, _)| *number == self.number) {
            table.under_way.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future;

    use super::super::{Reason, Want};
    use super::*;

    fn key() -> Key {
        ("http://a/".to_owned(), Want::Whole)
    }

    #[test]
    fn equal_fetches_share_until_done() {
        let flights = Flights::default();
        let busy = || future::ready(Err(FetchError::from(Reason::Busy))).boxed();
        let (first, joined) = flights.join(&key(), || future::pending().boxed());
        assert!(!joined);
        let (second, joined) = flights.join(&key(), busy);
        assert!(joined && second.now_or_never().is_none());
        drop(first);
        let (third, joined) = flights.join(&key(), busy);
        assert!(!joined && third.now_or_never().is_some());
        assert!(flights.0.lock().unwrap().under_way.is_empty());
    }
}

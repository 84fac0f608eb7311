//! Faults that a test switches on and off while a server runs.

use std::sync::{Mutex, PoisonError};

struct Rule<T> {
    part: String,
    what: T,
    left: Option<u32>,
}

/// An ordered list of what to do to which requests.
pub(crate) struct Rules<T>(Mutex<Vec<Rule<T>>>);

impl<T: Clone> Rules<T> {
    pub fn new() -> Self {
        Rules(Mutex::new(Vec::new()))
    }

    /// From now on, `times` times (for ever where `None`).
    pub fn add(&self, part: &str, what: T, times: Option<u32>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Rule {
            part: part.to_owned(),
            what,
            left: times,
        });
    }

    pub fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Everything that holds for a request now; what was to happen n times is used up by one.
    pub fn take(&self, matches: impl Fn(&str, &T) -> bool) -> Vec<T> {
        let mut rules = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = Vec::new();
        for rule in rules.iter_mut().filter(|r| r.left != Some(0)) {
            if matches(&rule.part, &rule.what) {
                rule.left = rule.left.map(|n| n - 1);
                found.push(rule.what.clone());
            }
        }
        found
    }
}

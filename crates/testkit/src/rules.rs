//! Rules that a test adds and removes while a server runs: which requests a fault applies to, and how often.

use parking_lot::Mutex;

struct Rule<T> {
    /// The text that a request must match.
    pattern: String,
    action: T,
    /// The number of requests that the rule still applies to; `None` for all.
    remaining: Option<u32>,
}

/// The active rules, in the order in which they were added.
pub(crate) struct Rules<T>(Mutex<Vec<Rule<T>>>);

impl<T: Clone> Rules<T> {
    pub fn new() -> Self {
        Rules(Mutex::new(Vec::new()))
    }

    /// Adds a rule for the next `times` requests that match; for all of them if `None`.
    pub fn add(&self, pattern: &str, action: T, times: Option<u32>) {
        self.0.lock().push(Rule { pattern: pattern.to_owned(), action, remaining: times });
    }

    /// Removes all rules.
    pub fn clear(&self) {
        self.0.lock().clear();
    }

    /// Returns the actions of the rules that match a request, and counts the request for each of these rules.
    pub fn take(&self, matches: impl Fn(&str, &T) -> bool) -> Vec<T> {
        let mut rules = self.0.lock();
        let mut found = Vec::new();
        for rule in rules.iter_mut().filter(|r| r.remaining != Some(0)) {
            if matches(&rule.pattern, &rule.action) {
                rule.remaining = rule.remaining.map(|n| n - 1);
                found.push(rule.action.clone());
            }
        }
        found
    }
}

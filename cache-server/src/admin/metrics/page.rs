//! Builds metric families from numbers that other rooms keep.

use prometheus::{CounterVec, GaugeVec, IntCounterVec, IntGaugeVec, Opts, Registry, proto::MetricFamily};

/// The error of the metrics library, for a name or label that breaks Prometheus' rules.
pub type MetricsError = prometheus::Error;

/// Metric families whose numbers are kept in other rooms.
#[derive(Default)]
pub struct Page {
    registry: Registry,
}

impl Page {
    /// Adds a family of counters, one for each row of label values.
    pub fn counter(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
        rows: &[(Vec<&str>, u64)],
    ) -> Result<(), MetricsError> {
        let family = IntCounterVec::new(Opts::new(name, help), labels)?;
        self.registry.register(Box::new(family.clone()))?;
        for (values, n) in rows {
            family.get_metric_with_label_values(values)?.inc_by(*n);
        }
        Ok(())
    }

    /// Adds a family of gauges of parts or rates, one for each row of label values.
    pub fn ratio(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
        rows: &[(Vec<&str>, f64)],
    ) -> Result<(), MetricsError> {
        let family = GaugeVec::new(Opts::new(name, help), labels)?;
        self.registry.register(Box::new(family.clone()))?;
        for (values, n) in rows {
            family.get_metric_with_label_values(values)?.set(*n);
        }
        Ok(())
    }

    /// Adds a family of counters in seconds, one for each row of label values.
    pub fn seconds(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
        rows: &[(Vec<&str>, f64)],
    ) -> Result<(), MetricsError> {
        let family = CounterVec::new(Opts::new(name, help), labels)?;
        self.registry.register(Box::new(family.clone()))?;
        for (values, n) in rows {
            family.get_metric_with_label_values(values)?.inc_by(*n);
        }
        Ok(())
    }

    /// Adds a family of gauges, one for each row of label values.
    pub fn gauge(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
        rows: &[(Vec<&str>, u64)],
    ) -> Result<(), MetricsError> {
        let family = IntGaugeVec::new(Opts::new(name, help), labels)?;
        self.registry.register(Box::new(family.clone()))?;
        for (values, n) in rows {
            family.get_metric_with_label_values(values)?.set(i64::try_from(*n).unwrap_or(i64::MAX));
        }
        Ok(())
    }

    /// Returns the families.
    pub fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }
}

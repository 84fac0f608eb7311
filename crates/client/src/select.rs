//! A selection: which samples an epoch delivers, from a table that somebody made.
//!
//! A file is Parquet or CSV (with a line of names), whatever it is called: Parquet begins with its magic. One of its
//! columns names samples, by key or by number; another may weigh them. What else it has is not read.
//!
//! 1. A row is a sample: one that is named twice is refused, and so is a row that names none. Nothing is guessed.
//! 2. Whether the version has these samples is for the server to say, when the job is declared.

use fletch_api::{PlanBase, WeightOf, Weights};
use fletch_core::Kind;
use parquet::{
    file::reader::{FileReader as _, SerializedFileReader},
    record::Field,
    schema::types::Type,
};
use std::{
    collections::HashSet,
    fs::File,
    io::{self, Read as _, Seek as _},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
};

/// No selection has more rows: as many as a plan has entries.
pub const ROWS_MAX: usize = 1 << 31;
/// How many of what is wrong an error names.
const NAMED: usize = 5;
/// What a column of keys, and one of numbers, is called when nobody says.
const USUAL: [&str; 2] = ["key", "number"];

/// Which columns say what.
#[derive(Debug, Clone, Default)]
pub struct Columns {
    /// The column of keys. Without this and `numbers`: the column `key`, or else `number`.
    pub keys: Option<String>,
    /// The column of sample numbers, in place of keys.
    pub numbers: Option<String>,
    /// The column of weights, each finite and at least 0.
    pub weights: Option<String>,
}

/// What was read.
#[derive(Debug, Clone, PartialEq)]
pub struct Selection {
    /// The samples, in the order of the rows.
    pub of: WeightOf,
    /// The weight of each.
    pub weights: Option<Vec<f64>>,
}

/// Why a file is no selection.
#[derive(Debug, thiserror::Error)]
pub enum SelectError {
    /// The system said so.
    #[error("{path}: {error}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// What it said.
        error: io::Error,
    },
    /// It is neither Parquet nor CSV that can be read.
    #[error("{path}: {why}")]
    Format {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A column is not there.
    #[error("{path} has no column {column}; it has {}", there.join(", "))]
    Column {
        /// Which file.
        path: PathBuf,
        /// What was looked for.
        column: String,
        /// What there is.
        there: Vec<String>,
    },
    /// Both keys and numbers were asked for.
    #[error("a selection is of keys or of numbers, not of both")]
    Both,
    /// A value is none.
    #[error("{path}, row {row}: {value} in column {column} is no {what}")]
    Value {
        /// Which file.
        path: PathBuf,
        /// Which row, from 1, the line of names not counted.
        row: usize,
        /// Which column.
        column: String,
        /// What stands there.
        value: String,
        /// What should.
        what: &'static str,
    },
    /// Samples that are named twice.
    #[error("{path} names {many} samples more than once, among them {}", first.join(", "))]
    Twice {
        /// Which file.
        path: PathBuf,
        /// How many.
        many: usize,
        /// The first few, in the order of the rows.
        first: Vec<String>,
    },
    /// It has no rows.
    #[error("{0} has no rows")]
    Empty(PathBuf),
    /// It has too many.
    #[error("{0} has more than {ROWS_MAX} rows")]
    Long(PathBuf),
}

impl SelectError {
    /// Who can act on it.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            SelectError::Io { error, .. } if error.kind() == io::ErrorKind::NotFound => Kind::NotFound,
            _ => Kind::Invalid,
        }
    }
}

/// What stands in a cell.
enum Cell {
    Text(String),
    Whole(i128),
    Real(f64),
    Nothing,
    Other(&'static str),
}

impl Cell {
    fn key(self) -> Result<String, Cell> {
        match self {
            Cell::Text(text) if !text.is_empty() => Ok(text),
            other => Err(other),
        }
    }

    fn number(self) -> Result<u64, Cell> {
        match &self {
            Cell::Text(text) => text.trim().parse().map_err(|_| self),
            Cell::Whole(n) => u64::try_from(*n).map_err(|_| self),
            _ => Err(self),
        }
    }

    fn weight(self) -> Result<f64, Cell> {
        let weight = match &self {
            Cell::Text(text) => text.trim().parse().ok(),
            // Weights are relative: what a whole number loses beyond 2^53 is nothing.
            Cell::Whole(n) => Some(*n as f64),
            Cell::Real(x) => Some(*x),
            Cell::Nothing | Cell::Other(_) => None,
        };
        weight.filter(|w| w.is_finite() && *w >= 0.0).ok_or(self)
    }

    fn shown(&self) -> String {
        match self {
            Cell::Text(text) => format!("{text:?}"),
            Cell::Whole(n) => n.to_string(),
            Cell::Real(x) => x.to_string(),
            Cell::Nothing => "nothing".to_owned(),
            Cell::Other(what) => format!("a {what}"),
        }
    }
}

impl From<&Field> for Cell {
    fn from(field: &Field) -> Self {
        match field {
            Field::Null => Cell::Nothing,
            Field::Str(text) => Cell::Text(text.clone()),
            Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
                Ok(text) => Cell::Text(text.to_owned()),
                Err(_) => Cell::Other("text that is not UTF-8"),
            },
            Field::Byte(n) => Cell::Whole((*n).into()),
            Field::Short(n) => Cell::Whole((*n).into()),
            Field::Int(n) => Cell::Whole((*n).into()),
            Field::Long(n) => Cell::Whole((*n).into()),
            Field::UByte(n) => Cell::Whole((*n).into()),
            Field::UShort(n) => Cell::Whole((*n).into()),
            Field::UInt(n) => Cell::Whole((*n).into()),
            Field::ULong(n) => Cell::Whole((*n).into()),
            Field::Float(x) => Cell::Real((*x).into()),
            Field::Double(x) => Cell::Real(*x),
            _ => Cell::Other("value of another type"),
        }
    }
}

/// The columns that are read: of samples (keys if true), and of weights.
struct Chosen {
    samples: (String, bool),
    weights: Option<String>,
}

impl Chosen {
    fn of(path: &Path, columns: &Columns, there: &[String]) -> Result<Self, SelectError> {
        let has = |name: &str| there.iter().any(|t| t == name);
        let samples = match (&columns.keys, &columns.numbers) {
            (Some(_), Some(_)) => return Err(SelectError::Both),
            (Some(name), None) => (name.clone(), true),
            (None, Some(name)) => (name.clone(), false),
            (None, None) if has(USUAL[0]) => (USUAL[0].to_owned(), true),
            (None, None) if has(USUAL[1]) => (USUAL[1].to_owned(), false),
            (None, None) => (USUAL.join(" or "), true),
        };
        for name in std::iter::once(&samples.0).chain(&columns.weights) {
            if !has(name) {
                let (path, column, there) = (path.to_owned(), name.clone(), there.to_vec());
                return Err(SelectError::Column { path, column, there });
            }
        }
        Ok(Chosen { samples, weights: columns.weights.clone() })
    }
}

/// Grows row by row.
struct Build<'a> {
    path: &'a Path,
    chosen: Chosen,
    of: WeightOf,
    weights: Vec<f64>,
    rows: usize,
}

impl<'a> Build<'a> {
    fn new(path: &'a Path, chosen: Chosen) -> Self {
        let of = if chosen.samples.1 { WeightOf::Keys(Vec::new()) } else { WeightOf::Samples(Vec::new()) };
        Build { path, chosen, of, weights: Vec::new(), rows: 0 }
    }

    fn row(&mut self, sample: Cell, weight: Option<Cell>) -> Result<(), SelectError> {
        self.rows += 1;
        if self.rows > ROWS_MAX {
            return Err(SelectError::Long(self.path.to_owned()));
        }
        let (path, row) = (self.path, self.rows);
        let no = |column: &str, what| {
            let (path, column) = (path.to_owned(), column.to_owned());
            move |cell: Cell| SelectError::Value { path, row, column, value: cell.shown(), what }
        };
        let column = &self.chosen.samples.0;
        match &mut self.of {
            WeightOf::Keys(keys) => keys.push(sample.key().map_err(no(column, "key"))?),
            WeightOf::Samples(numbers) => {
                numbers.push(sample.number().map_err(no(column, "sample number"))?);
            }
        }
        if let (Some(cell), Some(column)) = (weight, &self.chosen.weights) {
            self.weights.push(cell.weight().map_err(no(column, "weight (finite, at least 0)"))?);
        }
        Ok(())
    }

    fn done(self) -> Result<Selection, SelectError> {
        if self.rows == 0 {
            return Err(SelectError::Empty(self.path.to_owned()));
        }
        let twice = match &self.of {
            WeightOf::Keys(keys) => twice(keys.iter().map(|k| format!("{k:?}"))),
            WeightOf::Samples(numbers) => twice(numbers.iter().map(u64::to_string)),
        };
        if let Some((many, first)) = twice {
            return Err(SelectError::Twice { path: self.path.to_owned(), many, first });
        }
        let weights = self.chosen.weights.is_some().then_some(self.weights);
        Ok(Selection { of: self.of, weights })
    }
}

/// How many names come more than once, and the first few of them.
fn twice(names: impl Iterator<Item = String>) -> Option<(usize, Vec<String>)> {
    let (mut seen, mut again, mut first) = (HashSet::new(), HashSet::new(), Vec::new());
    for name in names {
        if !seen.insert(name.clone()) && again.insert(name.clone()) && first.len() < NAMED {
            first.push(name);
        }
    }
    (!again.is_empty()).then_some((again.len(), first))
}

impl Selection {
    /// Reads a file. Blocking.
    ///
    /// # Errors
    /// [`SelectError`].
    pub fn read(path: &Path, columns: &Columns) -> Result<Self, SelectError> {
        let io = |error| SelectError::Io { path: path.to_owned(), error };
        let mut file = File::open(path).map_err(io)?;
        let mut magic = Vec::new();
        (&mut file).take(4).read_to_end(&mut magic).map_err(io)?;
        file.rewind().map_err(io)?;
        if magic == b"PAR1" {
            // The crate means to answer garbage with errors, yet has assertions that garbage can reach.
            let read = catch_unwind(AssertUnwindSafe(|| Selection::read_parquet(path, columns, file)));
            let why = || "the parquet decoder gave up on it".to_owned();
            return read.unwrap_or_else(|_| Err(SelectError::Format { path: path.to_owned(), why: why() }));
        }
        Selection::read_csv(path, columns, file)
    }

    fn read_parquet(path: &Path, columns: &Columns, file: File) -> Result<Self, SelectError> {
        let bad = |e: parquet::errors::ParquetError| SelectError::Format {
            path: path.to_owned(),
            why: format!("it cannot be read ({e}); write it with snappy or without compression, or as CSV"),
        };
        let reader = SerializedFileReader::new(file).map_err(bad)?;
        let schema = reader.metadata().file_metadata().schema();
        let there: Vec<String> = schema.get_fields().iter().map(|f| f.name().to_owned()).collect();
        let mut build = Build::new(path, Chosen::of(path, columns, &there)?);
        let names = std::iter::once(&build.chosen.samples.0).chain(&build.chosen.weights);
        let names: Vec<String> = names.cloned().collect();
        let fields = schema.get_fields().iter().filter(|f| names.iter().any(|n| n == f.name()));
        let fields: Vec<Arc<Type>> = fields.cloned().collect();
        let wanted = Type::group_type_builder(schema.name()).with_fields(fields).build().map_err(bad)?;
        for row in reader.get_row_iter(Some(wanted)).map_err(bad)? {
            let row = row.map_err(bad)?;
            let cell = |name: &str| {
                row.get_column_iter().find(|(n, _)| *n == name).map_or(Cell::Nothing, |(_, f)| Cell::from(f))
            };
            build.row(cell(&names[0]), names.get(1).map(|n| cell(n)))?;
        }
        build.done()
    }

    fn read_csv(path: &Path, columns: &Columns, file: File) -> Result<Self, SelectError> {
        let bad = |e: csv::Error| SelectError::Format { path: path.to_owned(), why: e.to_string() };
        let mut reader = csv::Reader::from_reader(file);
        let there: Vec<String> = reader.headers().map_err(bad)?.iter().map(str::to_owned).collect();
        let mut build = Build::new(path, Chosen::of(path, columns, &there)?);
        let at = |name: &String| there.iter().position(|t| t == name).unwrap_or(usize::MAX);
        let (sample, weight) = (at(&build.chosen.samples.0), build.chosen.weights.as_ref().map(at));
        let mut record = csv::StringRecord::new();
        while reader.read_record(&mut record).map_err(bad)? {
            let cell = |i: usize| record.get(i).map_or(Cell::Nothing, |text| Cell::Text(text.to_owned()));
            build.row(cell(sample), weight.map(cell))?;
        }
        build.done()
    }

    /// How many samples.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.of {
            WeightOf::Keys(keys) => keys.len(),
            WeightOf::Samples(numbers) => numbers.len(),
        }
    }

    /// Whether it has none, which no file's has.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The plan: each sample once; with weights `draws` of them, as many as there are rows when that is not said.
    #[must_use]
    pub fn base(self, draws: Option<u64>) -> PlanBase {
        let draws = draws.unwrap_or(self.len() as u64);
        match (self.weights, self.of) {
            (None, WeightOf::Keys(keys)) => PlanBase::Keys(keys),
            (None, WeightOf::Samples(numbers)) => PlanBase::Samples(numbers),
            (Some(weights), of) => {
                let weights = weights.into_iter().map(Some).collect();
                PlanBase::Weights(Weights { weights, draws, of: Some(of) })
            }
        }
    }
}

#[cfg(test)]
mod tests;

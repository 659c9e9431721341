"""The npm package for the tests of clients."""

from tests.support import npm_package

package = npm_package.package

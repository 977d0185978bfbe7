// SPDX-License-Identifier: Apache-2.0

package reconciling

import (
	"context"
	"fmt"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// AddIndex adds an index of the cache. An object is not found by a key that is empty.
func AddIndex[O client.Object](
	ctx context.Context, indexer client.FieldIndexer, object O, name string, keys func(O) []string,
) error {
	err := indexer.IndexField(ctx, object, name, func(o client.Object) []string {
		return slices.DeleteFunc(keys(o.(O)), func(key string) bool { return key == "" })
	})
	if err != nil {
		return fmt.Errorf("index %s of %T: %w", name, object, err)
	}
	return nil
}

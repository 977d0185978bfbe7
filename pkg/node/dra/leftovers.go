package dra

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Leftovers are the files that package kubeletplugin writes about the devices of a prepared claim (KEP-5304) and has not
// taken away: it writes them at the end of a Prepare, also of one that the kubelet has given up and whose claim it has
// unprepared by then. Their names are the library's (metadata.go of k8s.io/dynamic-resource-allocation/kubeletplugin).
type Leftovers struct {
	// DriverDir is the directory of the driver, with one for each claim by namespace and name in a directory of its own.
	// CDIDir has files by the claim's UID.
	DriverDir, CDIDir string
	// Claims are what the journal knows. A claim that is being prepared is in it before anything is written.
	Claims func() []journal.Attachment
	Log    logr.Logger
}

// metadataPrefix is what the library's CDI files begin with; the UID of their claim follows.
const metadataPrefix = v1alpha1.GroupName + "_metadata_"

// leftoversEvery is how often files are looked for. They are small, and in nobody's way.
const leftoversEvery = time.Minute

// Run removes files at once and every now and then until ctx ends.
func (l *Leftovers) Run(ctx context.Context) error {
	for {
		if err := l.Remove(); err != nil {
			l.Log.Error(err, "Files that nobody needs any more remain", "retry", leftoversEvery.String())
		}
		if !loop.Sleep(ctx, leftoversEvery) {
			return nil
		}
	}
}

// Remove removes what belongs to no claim that is prepared. It may be called at any time.
func (l *Leftovers) Remove() error {
	files, err1 := filepath.Glob(filepath.Join(l.CDIDir, metadataPrefix+"*.json"))
	// What the library was writing when the agent was killed.
	unfinished, err2 := filepath.Glob(filepath.Join(l.CDIDir, "."+metadataPrefix+"*.tmp"))
	directories, err3 := filepath.Glob(filepath.Join(l.DriverDir, "dra-device-metadata", "*_*"))
	errs := []error{err1, err2, err3}
	// After the files: what is written from here on is of a claim that is in the journal.
	uids, names := map[types.UID]bool{}, map[string]bool{}
	for _, a := range l.Claims() {
		uids[a.Claim.UID], names[a.Claim.Namespace+"_"+a.Claim.Name] = true, true
	}
	for _, file := range slices.Concat(files, unfinished) {
		uid, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(filepath.Base(file), "."), metadataPrefix), "_")
		if uids[types.UID(uid)] {
			continue
		}
		if err := os.Remove(file); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	for _, directory := range directories {
		if !names[filepath.Base(directory)] {
			errs = append(errs, os.RemoveAll(directory))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("metadata of claims that are gone: %w", err)
	}
	return nil
}
